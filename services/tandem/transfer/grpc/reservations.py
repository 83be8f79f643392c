"""Write access of the I/O process to the KV pool, for blocks that arrive over gRPC.

A write needs an open `PoolReservation`, which says that the blocks belong to a sequence. The link
to the engine ends a sequence's reservations when it sends the command that gives up the blocks.
Both run on one event loop, so no write can follow that command.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import LeaseLost

Blocks = Sequence[bytes | memoryview]


@dataclass(slots=True, eq=False)
class PoolReservation:
    """Blocks of one sequence that one pull may fill."""

    sequence_id: str
    block_ids: Sequence[int]
    is_open: bool = True

    def check(self, first: int, num_blocks: int) -> None:
        """Raises LeaseLost if the reservation is closed or has no `num_blocks` blocks from `first`
        on.
        """
        if not self.is_open:
            raise LeaseLost(f"the engine was told that {self.sequence_id} gives up its pulls")
        if first + num_blocks > len(self.block_ids):
            raise LeaseLost(f"more bytes than {len(self.block_ids)} blocks")


class Reservations:
    """The open reservations of each sequence."""

    def __init__(self) -> None:
        self._open: dict[str, list[PoolReservation]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def open(self, sequence_id: str, block_ids: Sequence[int]) -> PoolReservation:
        reservation = PoolReservation(sequence_id, block_ids)
        self._open.setdefault(sequence_id, []).append(reservation)
        return reservation

    def close(self, reservation: PoolReservation) -> None:
        """Closes a reservation whose pull is over. May be called more than once."""
        reservation.is_open = False
        of_sequence = self._open.get(reservation.sequence_id, [])
        if reservation in of_sequence:
            of_sequence.remove(reservation)
        if not of_sequence:
            self._open.pop(reservation.sequence_id, None)

    def end(self, sequence_id: str) -> None:
        """Closes a sequence's reservations, because its blocks may go to another sequence."""
        for reservation in self._open.pop(sequence_id, ()):
            reservation.is_open = False


class PoolView(Protocol):
    """The KV pool. It is mapped either in this process or only in the engine process."""

    spans: BlockSpans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        """Returns the bytes of blocks that the sequence holds; they are valid until the next
        await.
        """

    def write(self, into: PoolReservation, first: int, data: memoryview) -> None:
        """Writes whole blocks, starting at index `first` of the reservation. Raises LeaseLost."""


class PoolOwner(Protocol):
    """The parts of the link to the engine process that give access to the KV pool."""

    pool: PoolView
    reservations: Reservations
