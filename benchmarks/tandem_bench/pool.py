"""A pool's memory as the transfer bench fills and checks it.

Producer and consumer are other processes, so what each block holds follows from its id alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.pool_memory import own_pages, size_shared

_MARK_BYTES = 8


def pool_memory(layout: KvLayout, pool_fd: int | None = None) -> NDArray[np.uint8]:
    """Returns memory [num_blocks, block_bytes] in the kind of pages that an engine's pool has, all
    touched."""
    num_bytes = layout.pool_bytes
    pages = own_pages(num_bytes) if pool_fd is None else size_shared(pool_fd, num_bytes)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 0
    return memory.reshape(layout.num_blocks, layout.block_bytes)


def fill(blocks: NDArray[np.uint8]) -> None:
    """Writes [num_blocks, block_bytes] so that `differing` knows each block again."""
    for block_id, block in enumerate(blocks):
        block[:] = block_id * 37 % 251 + 1
        block[:_MARK_BYTES] = _mark(block_id)


def differing(block: NDArray[np.uint8], block_id: int) -> bool:
    """Returns whether `block` differs from the content that `fill` gave the producer's block
    `block_id`."""
    body = block[_MARK_BYTES:]
    return bool((block[:_MARK_BYTES] != _mark(block_id)).any() or (body != body[-1]).any()) or (
        int(body[-1]) != block_id * 37 % 251 + 1
    )


def _mark(block_id: int) -> NDArray[np.uint8]:
    return np.frombuffer(block_id.to_bytes(_MARK_BYTES, "little"), np.uint8)
