"""A machine whose workers share its cores: when more are busy than it has, each is slower.

A worker has one thread. `cores` need not be whole: it is by how much all workers together are
faster than one alone, memory and everything else that they share counted in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.simulator.workers.worker import Worker


class Host:
    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._workers: list[Worker] = []
        self._busy: set[int] = set()
        self._speed = 1.0

    def join(self, worker: Worker) -> int:
        """Adds a worker; returns its number for `note`."""
        self._workers.append(worker)
        return len(self._workers) - 1

    def note(self, number: int, *, busy: bool) -> None:
        """Notes whether a worker computes now; slows all when more do than there are cores."""
        if busy:
            self._busy.add(number)
        else:
            self._busy.discard(number)
        speed = min(1.0, self._cores / max(1, len(self._busy)))
        if speed != self._speed:
            self._speed = speed
            for worker in self._workers:
                worker.set_speed(speed)
