"""The KV pool as the I/O process fills it with bytes that come by gRPC.

Writes want a `Reservation`: the blocks are a sequence's, and stay so until the engine is told
something else about it. That is known exactly, because the same event loop tells it: the link ends
a sequence's reservations when it sends the command, and a write after that is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import LeaseLost

Blocks = Sequence[bytes | memoryview]


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks of a sequence that one pull may fill, by their ids."""

    sequence_id: str
    block_ids: Sequence[int]
    is_open: bool = True

    def check(self, first: int, num_blocks: int) -> None:
        """Raises LeaseLost when blocks `first`.. of it must not be written (any more)."""
        if not self.is_open:
            raise LeaseLost(f"the engine was told that {self.sequence_id} gives up its pulls")
        if first + num_blocks > len(self.block_ids):
            raise LeaseLost(f"more bytes than {len(self.block_ids)} blocks")


class Reservations:
    """The reservations that are open, by sequence."""

    def __init__(self) -> None:
        self._open: dict[str, list[Reservation]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def open(self, sequence_id: str, block_ids: Sequence[int]) -> Reservation:
        reservation = Reservation(sequence_id, block_ids)
        self._open.setdefault(sequence_id, []).append(reservation)
        return reservation

    def close(self, reservation: Reservation) -> None:
        """Closes a reservation whose pull is over; may be called any number of times."""
        reservation.is_open = False
        of_sequence = self._open.get(reservation.sequence_id, [])
        if reservation in of_sequence:
            of_sequence.remove(reservation)
        if not of_sequence:
            self._open.pop(reservation.sequence_id, None)

    def end(self, sequence_id: str) -> None:
        """Closes a sequence's reservations: its blocks may be another's from now on."""
        for reservation in self._open.pop(sequence_id, ()):
            reservation.is_open = False


class PoolView(Protocol):
    """The KV pool, which is mapped in this process or in the engine process alone."""

    spans: BlockSpans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        """Returns the bytes of blocks that the sequence holds, valid until the next await."""

    def write(self, into: Reservation, first: int, data: memoryview) -> None:
        """Fills whole blocks, from the `first` of the reservation on. Raises LeaseLost."""


class PoolOwner(Protocol):
    """The link to the engine process, as far as the bytes of its pool are concerned."""

    pool: PoolView
    reservations: Reservations
