"""Starts lines of batches one after the other, when there is spare capacity (spare.py)."""

import asyncio
import contextlib
from collections.abc import Callable

POLL_S = 0.05  # capacity may appear without a message of a worker, because time has passed


class Gate:
    """All batches of a router share one gate. They take turns, because the gate serves those that
    wait in order of arrival."""

    def __init__(self, may_start: Callable[[], bool]) -> None:
        self._may_start = may_start
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self.num_lines = 0  # lines that have started and not ended

    def notify(self) -> None:
        """Says that capacity may have changed."""
        self._changed.set()

    async def turn(self) -> None:
        """Waits until one line may start or go on."""
        async with self._turn:
            while not self._may_start():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()

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
            self._gate.notify()
            self._gate = None
