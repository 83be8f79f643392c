"""The KV pool as the I/O process reads and writes it, for blocks that travel by gRPC.

On a CPU both processes of a worker map the pool's memory (`MappedPool`), and bytes go straight
between it and gRPC. Where that cannot be (CUDA, a system without memfd) they go through the engine
process, with messages (`PoolThroughEngine`).

Writes want a `Reservation`: the blocks are a sequence's, and stay so until the engine is told
something else about it. That is known exactly, because the same event loop tells it: the link ends
a sequence's reservations when it sends the command, and a write after that is refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.errors import InternalError, LeaseLost
from tandem.worker.engine_process.messages import StoreBytes

if TYPE_CHECKING:
    from tandem.worker.engine_process.link import EngineLink

Blocks = Sequence[bytes | memoryview]


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that one pull may fill: `first_block`.. of a sequence's table, by their ids."""

    sequence_id: str
    first_block: int
    block_ids: Sequence[int]
    is_open: bool = True

    def check(self, first: int, num_blocks: int) -> None:
        """Raises LeaseLost when blocks `first`.. of it must not be written (any more)."""
        if not self.is_open:
            raise LeaseLost(f"the engine was told that {self.sequence_id} gives up its pulls")
        if first + num_blocks > len(self.block_ids):
            raise LeaseLost(f"more bytes than {len(self.block_ids)} blocks")


class Reservations:
    """All that are open, by sequence."""

    def __init__(self) -> None:
        self._open: dict[str, list[Reservation]] = {}

    def open(self, sequence_id: str, first_block: int, block_ids: Sequence[int]) -> Reservation:
        reservation = Reservation(sequence_id, first_block, block_ids)
        self._open.setdefault(sequence_id, []).append(reservation)
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Its pull is over; any number of times."""
        reservation.is_open = False
        of_sequence = self._open.get(reservation.sequence_id, [])
        if reservation in of_sequence:
            of_sequence.remove(reservation)
        if not of_sequence:
            self._open.pop(reservation.sequence_id, None)

    def end(self, sequence_id: str) -> None:
        """The sequence's blocks may be another's from now on."""
        for reservation in self._open.pop(sequence_id, ()):
            reservation.is_open = False


class PoolView(Protocol):
    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        """The bytes of blocks that the sequence holds: good until the next await."""

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        """Fills whole blocks, from the `first` of the reservation on. Raises LeaseLost."""


class MappedPool:
    """The pool's memory, mapped here, too. Holds views of it, and copies nothing it need not."""

    def __init__(self, memory: mmap.mmap, block_bytes: int) -> None:
        self._memory = memoryview(memory)
        self._block_bytes = block_bytes

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        return [self._block(block_id) for block_id in block_ids]

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        size = self._block_bytes
        num_blocks = _whole_blocks(data, size)
        into.check(first, num_blocks)
        for row, block_id in enumerate(into.block_ids[first : first + num_blocks]):
            self._block(block_id)[:] = data[row * size : (row + 1) * size]

    def _block(self, block_id: int) -> memoryview:
        block = self._memory[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]
        if len(block) != self._block_bytes:
            raise InternalError(f"block {block_id} is not in the pool")
        return block


class PoolThroughEngine:
    """Bytes as messages to and from the engine process; commands keep their order."""

    def __init__(self, link: EngineLink, block_bytes: int) -> None:
        self._link = link
        self._block_bytes = block_bytes

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        data = await self._link.load_bytes(sequence_id, list(block_ids))
        size = self._block_bytes
        return [data[row * size : (row + 1) * size] for row in range(len(block_ids))]

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        num_blocks = _whole_blocks(data, self._block_bytes)
        into.check(first, num_blocks)
        store = StoreBytes(into.sequence_id, into.first_block + first, num_blocks)
        self._link.send(store, data)


def _whole_blocks(data: memoryview, block_bytes: int) -> int:
    num_blocks, rest = divmod(len(data), block_bytes)
    if rest:
        raise LeaseLost(f"{len(data)} bytes are not whole blocks of {block_bytes}")
    return num_blocks
