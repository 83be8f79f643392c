"""A machine whose workers share its cores: when more are busy than it has, each is slower.

A worker has one thread. `cores` need not be whole: it is by how much all workers together are
faster than one alone, memory and everything else that they share counted in.
"""

from __future__ import annotations

from typing import Protocol


class Sharer(Protocol):
    def set_speed(self, speed: float) -> None: ...


class Host:
    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._sharers: list[Sharer] = []
        self._busy: set[int] = set()
        self._speed = 1.0

    def join(self, sharer: Sharer) -> int:
        """What it is to be called in `note`."""
        self._sharers.append(sharer)
        return len(self._sharers) - 1

    def note(self, number: int, *, busy: bool) -> None:
        """Whether it computes now; the speed of all changes when there are more than cores."""
        if busy:
            self._busy.add(number)
        else:
            self._busy.discard(number)
        speed = min(1.0, self._cores / max(1, len(self._busy)))
        if speed != self._speed:
            self._speed = speed
            for sharer in self._sharers:
                sharer.set_speed(speed)
