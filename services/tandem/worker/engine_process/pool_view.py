"""The KV pool as the I/O process reads and writes it, for blocks that travel by gRPC.

On a CPU both processes of a worker map the pool's memory (`MappedPool`), and bytes go straight
between it and gRPC. Where that cannot be (CUDA, a system without memfd) they go through the engine
process, with messages (`PoolThroughEngine`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.errors import InternalError, LeaseLost
from tandem.transfer.grpc.reservations import Blocks, Reservation
from tandem.worker.engine_process.messages import StoreBytes

if TYPE_CHECKING:
    from tandem.worker.engine_process.link import EngineLink


class MappedPool:
    """The pool's memory, mapped here, too. Holds views of it, and copies nothing it need not."""

    def __init__(self, memory: mmap.mmap, block_bytes: int) -> None:
        self._memory = memoryview(memory)
        self.block_bytes = block_bytes

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        return [self._block(block_id) for block_id in block_ids]

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        size = self.block_bytes
        for row, block_id in enumerate(_targets(into, first, data, size)):
            self._block(block_id)[:] = data[row * size : (row + 1) * size]

    def _block(self, block_id: int) -> memoryview:
        block = self._memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]
        if len(block) != self.block_bytes:
            raise InternalError(f"block {block_id} is not in the pool")
        return block


class PoolThroughEngine:
    """Bytes as messages to and from the engine process; commands keep their order."""

    def __init__(self, link: EngineLink, block_bytes: int) -> None:
        self._link = link
        self.block_bytes = block_bytes

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        data = await self._link.load_bytes(sequence_id, list(block_ids))
        size = self.block_bytes
        return [data[row * size : (row + 1) * size] for row in range(len(block_ids))]

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        block_ids = list(_targets(into, first, data, self.block_bytes))
        self._link.send(StoreBytes(into.sequence_id, block_ids), data)


def _targets(into: Reservation, first: int, data: memoryview, block_bytes: int) -> Sequence[int]:
    """Returns the blocks that `data` may be written into. Raises LeaseLost when it may not."""
    num_blocks, rest = divmod(len(data), block_bytes)
    if rest:
        raise LeaseLost(f"{len(data)} bytes are not whole blocks of {block_bytes}")
    into.check(first, num_blocks)
    return into.block_ids[first : first + num_blocks]
