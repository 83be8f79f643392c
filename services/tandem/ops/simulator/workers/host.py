"""A machine whose workers share its cores: when more are busy than it has, each is slower.

A worker has one thread. `cores` need not be whole: it is by how much all workers together are
faster than one alone, memory and everything else that they share counted in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.ops.simulator.workers.worker import Worker


class Host:
    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._is_busy: dict[Worker, bool] = {}
        self._speed = 1.0

    def join(self, worker: Worker) -> None:
        self._is_busy[worker] = False

    def note(self, worker: Worker, *, busy: bool) -> None:
        """Notes whether a worker computes now; slows all when more do than there are cores."""
        self._is_busy[worker] = busy
        speed = min(1.0, self._cores / max(1, sum(self._is_busy.values())))
        if speed != self._speed:
            self._speed = speed
            for each in self._is_busy:
                each.set_speed(speed)
