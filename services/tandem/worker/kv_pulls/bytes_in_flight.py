"""Limits the bytes that simultaneous pulls transfer, for the whole worker and for each peer.

    async with limits.taken(peer_id, num_bytes):
        ...  # the pull runs here, once both limits permit it

Pulls wait in one queue, the oldest first. A pull that would exceed its peer's limit is overtaken by
pulls from other peers, so a slow peer delays only its own pulls. A pull that would exceed the
worker's limit is not overtaken. For example, the limits are 256 MiB for the worker and 128 MiB for
each peer. Two pulls of 100 MiB from one peer then run one after the other, and two from different
peers run at the same time.

A pull that is larger than a limit starts when no other pull counts towards this limit.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    peer_id: str
    num_bytes: int
    turn: asyncio.Future[None]


class BytesInFlight:
    """The running pulls and the queue of waiting ones. All calls must come from one event loop."""

    def __init__(self, *, bytes_max: int, peer_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._peer_bytes_max = peer_bytes_max
        self.num_bytes = 0
        self._of_peer: Counter[str] = Counter()
        self._line: list[_Waiter] = []

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @asynccontextmanager
    async def taken(self, peer_id: str, num_bytes: int) -> AsyncIterator[None]:
        await self._take(peer_id, num_bytes)
        try:
            yield
        finally:
            self._give_back(peer_id, num_bytes)

    async def _take(self, peer_id: str, num_bytes: int) -> None:
        waiter = _Waiter(peer_id, num_bytes, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._admit()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                # the pull had been admitted before its task was cancelled
                self._give_back(peer_id, num_bytes)
            else:
                self._line.remove(waiter)
                self._admit()
            raise

    def _give_back(self, peer_id: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._of_peer[peer_id] -= num_bytes
        if not self._of_peer[peer_id]:
            del self._of_peer[peer_id]
        self._admit()

    def _admit(self) -> None:
        """Starts all waiting pulls that the limits permit.

        If a pull would exceed the worker's limit, all pulls behind it wait, too. Otherwise small
        pulls could delay a large one for ever.
        """
        held_back: set[str] = set()
        still: list[_Waiter] = []
        for number, waiter in enumerate(self._line):
            if waiter.turn.cancelled():  # the cancelled task removes its waiter itself, in `_take`
                still.append(waiter)
                continue
            of_peer = self._of_peer[waiter.peer_id]
            if waiter.peer_id in held_back or not _fits(
                of_peer, waiter.num_bytes, self._peer_bytes_max
            ):
                held_back.add(waiter.peer_id)
                still.append(waiter)
            elif not _fits(self.num_bytes, waiter.num_bytes, self._bytes_max):
                still += self._line[number:]
                break
            else:
                self.num_bytes += waiter.num_bytes
                self._of_peer[waiter.peer_id] += waiter.num_bytes
                waiter.turn.set_result(None)
        self._line = still


def _fits(taken: int, num_bytes: int, bytes_max: int) -> bool:
    return not taken or taken + num_bytes <= bytes_max
