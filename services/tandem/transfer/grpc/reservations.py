"""Controls which blocks of the KV pool the I/O process may fill with bytes received over gRPC.

A write needs an open `PoolReservation` of the sequence that holds the blocks. Some commands to the
engine release a sequence's blocks. When the I/O process sends such a command, it also closes the
sequence's reservations. Writes and commands run on one event loop, so no write can happen after the
command.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import LeaseLost

Blocks = Sequence[bytes | memoryview]

# Approximate number of bytes of a message. A message has one or more whole blocks.
MESSAGE_BYTES = 1 << 20
# The same if the engine process copies the bytes of each message. It does so only between two
# steps, so that small messages would wait for a step each. At 25 GB/s, copying 16 MiB takes 0.7 ms.
# The largest message that gRPC accepts here has 64 MiB.
ENGINE_MESSAGE_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class PoolReservation:
    """The permission for one pull to fill some blocks of one sequence."""

    sequence_id: str
    block_ids: Sequence[int]
    is_open: bool = True

    def check(self, first: int, num_blocks: int) -> None:
        """Raises LeaseLost if the reservation is closed, or if fewer than `num_blocks` of its
        blocks are left from `block_ids[first]` on.
        """
        if not self.is_open:
            raise LeaseLost(f"the pulls of sequence {self.sequence_id} were given up")
        if first + num_blocks > len(self.block_ids):
            raise LeaseLost(
                f"the peer sent more bytes than the {len(self.block_ids)} requested KV blocks have"
            )


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
        """Closes all reservations of a sequence, because the engine may now reuse the blocks."""
        for reservation in self._open.pop(sequence_id, ()):
            reservation.is_open = False


class PoolView(Protocol):
    """Gives the I/O process access to the KV pool, even if only the engine process has mapped the
    pool's memory."""

    spans: BlockSpans
    message_bytes: int  # approximate size of the messages in which blocks are sent

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        """Returns the bytes of blocks that the sequence holds.

        The caller must use the bytes before its next `await`. Later the bytes may change.
        """

    def write(self, into: PoolReservation, first: int, data: memoryview) -> None:
        """Writes `data`, the bytes of one or more whole blocks, into consecutive blocks of the
        reservation `into`. The first of them is `into.block_ids[first]`.

        Raises LeaseLost if the reservation is closed or has too few blocks.
        """

    async def read_probe(self, num_bytes: int) -> bytes | memoryview:
        """Returns zero bytes that have taken the way of `read`, so that its speed is measured."""

    def write_probe(self, data: memoryview) -> None:
        """Moves `data` the way of `write`, to memory that is not part of the pool."""


class PoolOwner(Protocol):
    """The parts of the link to the engine process that give access to the KV pool."""

    pool: PoolView
    reservations: Reservations
