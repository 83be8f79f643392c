"""Starts lines of batches one after the other, when there is spare capacity (spare.py)."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

POLL_S = 0.05  # capacity may appear without a message of a worker, because time has passed
# A worker's load may count a line for this many seconds after the line has left the worker.
REPORTED_S = 1.0


class Gate:
    """All batches of a router share one gate. They take turns, because the gate serves those that
    wait in order of arrival."""

    def __init__(
        self, may_start: Callable[[float], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`may_start` gets the seconds since the last line started."""
        self._may_start = may_start
        self._clock = clock
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._started_at = 0.0
        self._left_at: deque[float] = deque()
        self.num_lines = 0  # lines that have started and not ended

    def notify(self) -> None:
        """Says that capacity may have changed."""
        self._changed.set()

    def note_left(self) -> None:
        """Says that a line has left its worker."""
        self._left_at.append(self._clock())
        self.notify()

    @property
    def num_left(self) -> int:
        """Number of lines that have just left their workers, and may still count there."""
        oldest = self._clock() - REPORTED_S
        while self._left_at and self._left_at[0] < oldest:
            self._left_at.popleft()
        return len(self._left_at)

    async def turn(self) -> None:
        """Waits until one line may start or go on."""
        async with self._turn:
            while not self._may_start(self._clock() - self._started_at):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()
            self._started_at = self._clock()

    async def enter(self) -> "Place":
        """Waits until one line may start. The line counts as running until `Place.leave`."""
        await self.turn()
        self.num_lines += 1
        return Place(self)


class Place:
    """One running line in a gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def leave(self) -> None:
        """Ends the line. Further calls have no effect."""
        if self._gate is not None:
            self._gate.num_lines -= 1
            self._gate.note_left()
            self._gate = None
