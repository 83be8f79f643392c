"""Reads and writes whole blocks whose heads are divided among the pools of several ranks.

Heads are the outermost axis of a block, so a block is the bytes of its ranks, one after the other:

    block    | heads of rank 0 | heads of rank 1 | ...

Ranks with the same heads (replicas) have the same bytes, which are in the block once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.engine.cache.layout.rank_heads import RankHeads
from tandem.engine.executor.rank_memory import RankMemory
from tandem.engine.executor.ranks import messages
from tandem.engine.executor.ranks.shared_memory import SharedMemoryCollectives
from tandem.errors import InternalError

Bytes = NDArray[np.uint8]


class RankPoolBytes:
    """The bytes of whole blocks, as those of `PoolBytes`. Rank 0 calls `read` and `write`, and the
    other ranks call `collect` and `distribute` with the same blocks."""

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KvLayout,
        memory: RankMemory,
        ranks: SharedMemoryCollectives,
    ) -> None:
        """`kv` is the memory of this rank's pools, and `layout` that of whole blocks."""
        share = ranks.share
        heads = RankHeads(layout.num_kv_heads, share.num_ranks)
        own_layout = layout.of_rank(share.num_ranks)
        self._own = pool_bytes(kv, own_layout)
        self._own_spans = own_layout.spans
        self._replicas = heads.replicas
        self._num_parts = share.num_ranks // heads.replicas  # of a block
        self._part = share.rank // heads.replicas
        self._memory = memory
        self._ranks = ranks
        self.read_probe = self._own.read_probe
        self.write_probe = self._own.write_probe

    def read(self, block_ids: list[int]) -> memoryview:
        """Returns a copy of the blocks' bytes, concatenated in the order of `block_ids`."""
        self._memory.post(messages.ReadBlocks(block_ids))
        parts = self.collect(block_ids)[:: self._replicas]
        whole = []
        start = 0
        for num_blocks, size in self._runs(block_ids):
            run = slice(start, start + num_blocks * size)
            start = run.stop
            blocks = np.stack([part[run].reshape(num_blocks, size) for part in parts], axis=1)
            whole.append(blocks.reshape(-1))
        return np.concatenate(whole).data.cast("B")

    def write(self, block_ids: list[int], data: bytes | memoryview) -> None:
        """Copies `data`, the concatenated bytes of these blocks, into the pools of all ranks.
        Raises InternalError if the size does not match."""
        whole = np.frombuffer(data, np.uint8)
        if (expected := self.num_bytes(block_ids)) != len(whole):
            raise InternalError(
                f"{len(block_ids)} KV blocks have {expected} bytes, but {len(whole)} bytes were "
                "given"
            )
        self._memory.post(messages.WriteBlocks(block_ids), whole.data)
        self.distribute(block_ids, whole)

    def num_bytes(self, block_ids: Sequence[int]) -> int:
        """Returns the total bytes of whole blocks."""
        return self._own_spans.num_bytes(block_ids) * self._num_parts

    def collect(self, block_ids: list[int]) -> list[Bytes]:
        """Returns each rank's part of the blocks. Valid until the next exchange but one."""
        own = torch.frombuffer(self._own.read(block_ids), dtype=torch.uint8)
        return [found.numpy() for found in self._ranks.exchange_equal(own)]

    def distribute(self, block_ids: list[int], whole: Bytes) -> None:
        """Copies this rank's part of the blocks into its pools."""
        own = []
        start = 0
        for num_blocks, size in self._runs(block_ids):
            run = slice(start, start + num_blocks * self._num_parts * size)
            start = run.stop
            own.append(whole[run].reshape(num_blocks, self._num_parts, size)[:, self._part])
        self._own.write(
            block_ids, np.concatenate([each.reshape(-1) for each in own]).data.cast("B")
        )

    def _runs(self, block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (number of blocks, bytes of this rank in each) of each run of blocks of equal
        size. Blocks of different KV groups may differ in size."""
        spans = map(self._own_spans.span, block_ids)
        for size, run in groupby(span.stop - span.start for span in spans):
            yield sum(1 for _ in run), size
