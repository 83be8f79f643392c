"""Resizes pools of simulated workers, and counts the worker seconds that are paid for.

States of a worker, with the cause of a transition in the arrow:

    off --resize--> starting --cold start--> ready --resize--> draining --idle--> off

As in a cluster, the newest worker is removed first, and starting and draining workers are paid for.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.workers.worker import SimulatedWorker

_State = Literal["off", "starting", "ready", "draining"]


class Fleet:
    """One pool, created with the largest number of workers that it may reach. The pool calls
    `on_start` after a cold start, `on_drain` when a drain begins, and `on_stop` when a worker is
    off."""

    def __init__(
        self,
        clock: Clock,
        workers: Iterable[SimulatedWorker],
        *,
        cold_start_s: float,
        on_start: Callable[[SimulatedWorker], None],
        on_drain: Callable[[SimulatedWorker], None],
        on_stop: Callable[[SimulatedWorker], None],
    ) -> None:
        self._clock = clock
        self._workers = list(workers)
        self._cold_start_s = cold_start_s
        self._on_start = on_start
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._states: list[_State] = ["ready"] * len(self._workers)
        self._starts = [0] * len(self._workers)
        self._paid_s = 0.0
        self._paid_until_s = 0.0
        self.sizes: list[tuple[float, int]] = []  # (time, wanted size) of each change

    @property
    def wanted(self) -> int:
        return sum(state in ("starting", "ready") for state in self._states)

    def open(self, size: int) -> None:
        """Sets the initial state: `size` workers are ready, the others are off. `open` must be
        called before other methods."""
        for number in range(size, len(self._workers)):
            self._turn_off(number)
        self.sizes.append((self._clock.now_s, size))

    def resize(self, size: int) -> None:
        """Starts the workers with the lowest numbers that are off, or drains those with the highest
        numbers that are running."""
        self.pay()
        if size != self.wanted:
            self.sizes.append((self._clock.now_s, size))
        while self.wanted < size and "off" in self._states:  # A draining worker is not reused.
            number = self._states.index("off")
            self._states[number] = "starting"
            self._starts[number] += 1
            self._clock.after(self._cold_start_s, self._started, number, self._starts[number])
        while self.wanted > size:
            number = max(n for n, s in enumerate(self._states) if s in ("starting", "ready"))
            if self._states[number] == "starting":
                self._states[number] = "off"
                continue
            self._states[number] = "draining"
            self._on_drain(self._workers[number])

    def collect(self) -> None:
        """Turns off the workers that have drained."""
        self.pay()
        for number, state in enumerate(self._states):
            if state == "draining" and self._workers[number].is_idle:
                self._turn_off(number)

    def pay(self) -> float:
        """Returns the worker seconds until now."""
        count = sum(state != "off" for state in self._states)
        self._paid_s += count * (self._clock.now_s - self._paid_until_s)
        self._paid_until_s = self._clock.now_s
        return self._paid_s

    def _started(self, number: int, start: int) -> None:
        if self._states[number] == "starting" and self._starts[number] == start:
            self._states[number] = "ready"
            self._on_start(self._workers[number])

    def _turn_off(self, number: int) -> None:
        self._states[number] = "off"
        self._on_stop(self._workers[number])
