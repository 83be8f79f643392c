"""The I/O process's access to the KV pool, for blocks that travel over gRPC.

On a CPU both processes of a worker map the pool's memory (`MappedPool`), and gRPC reads and writes
it directly. On CUDA and on systems without memfd, the bytes pass through the engine process as
messages (`PoolThroughEngine`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.cache.block_spans import BlockSpans
from tandem.errors import InternalError, LeaseLost
from tandem.transfer.grpc.reservations import Blocks, Reservation
from tandem.worker.engine_process.messages import StoreBytes

if TYPE_CHECKING:
    from tandem.worker.engine_process.link import EngineLink


class MappedPool:
    """The pool's memory, mapped into this process. Reads return views, not copies."""

    def __init__(self, memory: mmap.mmap, spans: BlockSpans) -> None:
        self._memory = memoryview(memory)
        self.spans = spans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        return [self._block(block_id) for block_id in block_ids]

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        at = 0
        for block_id in _targets(into, first, data, self.spans):
            block = self._block(block_id)
            block[:] = data[at : at + len(block)]
            at += len(block)

    def _block(self, block_id: int) -> memoryview:
        try:
            return self._memory[self.spans.span(block_id)]
        except ValueError as error:
            raise InternalError(str(error)) from error


class PoolThroughEngine:
    """Sends bytes to and from the engine process as messages, in order with its commands."""

    def __init__(self, link: EngineLink, spans: BlockSpans) -> None:
        self._link = link
        self.spans = spans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        data = await self._link.load_bytes(sequence_id, list(block_ids))
        blocks, at = [], 0
        for span in map(self.spans.span, block_ids):
            size = span.stop - span.start
            blocks.append(data[at : at + size])
            at += size
        return blocks

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        block_ids = list(_targets(into, first, data, self.spans))
        self._link.send(StoreBytes(into.sequence_id, block_ids), data)


def _targets(into: Reservation, first: int, data: memoryview, spans: BlockSpans) -> Sequence[int]:
    """Returns the blocks that `data` fills. Raises LeaseLost if it may not be written."""
    block_ids = into.block_ids[first:]
    num_blocks = spans.count(block_ids, len(data))
    if num_blocks is None:
        raise LeaseLost(f"{len(data)} bytes are not whole blocks of {len(block_ids)}")
    into.check(first, num_blocks)
    return block_ids[:num_blocks]
