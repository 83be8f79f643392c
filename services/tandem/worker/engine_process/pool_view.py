"""The I/O process's access to the KV pool, for blocks that are sent or received over gRPC.

On a CPU both processes of a worker map the pool's memory (`MappedPool`), and gRPC reads and writes
it directly. On CUDA and on systems without memfd, the bytes pass through the engine process as
messages (`PoolThroughEngine` in link.py).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import InternalError, LeaseLost
from tandem.transfer.grpc.reservations import MESSAGE_BYTES, Blocks, PoolReservation


class MappedPool:
    """The pool's memory, mapped into this process. Reads return views, not copies."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, memory: mmap.mmap, spans: BlockSpans) -> None:
        self._memory = memoryview(memory)
        self.spans = spans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        return [self._block(block_id) for block_id in block_ids]

    def write(self, into: PoolReservation, first: int, data: memoryview) -> None:
        at = 0
        for block_id in targets(into, first, data, self.spans):
            block = self._block(block_id)
            block[:] = data[at : at + len(block)]
            at += len(block)

    async def read_probe(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    def write_probe(self, data: memoryview) -> None:
        """Does nothing: `write` only copies memory, which takes little of a pull's time."""

    def _block(self, block_id: int) -> memoryview:
        try:
            return self._memory[self.spans.span(block_id)]
        except ValueError as error:
            raise InternalError(str(error)) from error


def targets(
    into: PoolReservation, first: int, data: memoryview, spans: BlockSpans
) -> Sequence[int]:
    """Returns the ids of the blocks that `data` fills. The first is `into.block_ids[first]`.

    Raises LeaseLost if `data` is not whole blocks or the reservation is closed.
    """
    block_ids = into.block_ids[first:]
    num_blocks = spans.count(block_ids, len(data))
    if num_blocks is None:
        raise LeaseLost(
            f"the data for KV blocks has {len(data)} bytes; it must fill whole blocks, at most "
            f"{len(block_ids)} of them"
        )
    into.check(first, num_blocks)
    return block_ids[:num_blocks]
