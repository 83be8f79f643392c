"""Resizes a pool of simulated workers, and counts the worker seconds that must be paid.

    state      meaning                                    next state
    off        does not run, costs nothing                starting, if the pool grows
    starting   is being started                           ready, after `cold_start_s`;
                                                          off, if the pool shrinks before
    ready      gets requests                              draining, if the pool shrinks
    draining   finishes its requests, gets no new ones    off, when it has finished

A worker costs its time in every state but off. If the pool shrinks, the newest worker leaves first.
"""

from collections.abc import Callable, Iterable
from typing import Literal

from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.workers.worker import SimulatedWorker

_State = Literal["off", "starting", "ready", "draining"]


class Fleet:
    """One pool of workers. The pool is created with the largest number of workers that it may ever
    have. The pool calls `on_start` when a worker is ready, `on_drain` when a worker begins to
    drain, and `on_stop` when a worker is off."""

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
        self.sizes: list[tuple[float, int]] = []  # (time, new size) of each resize

    @property
    def wanted(self) -> int:
        return sum(state in ("starting", "ready") for state in self._states)

    def open(self, size: int) -> None:
        """Makes the first `size` workers ready and turns the others off. Must be called before the
        other methods."""
        for number in range(size, len(self._workers)):
            self._turn_off(number)
        self.sizes.append((self._clock.now_s, size))

    def resize(self, size: int) -> None:
        """Starts workers that are off, lowest number first, or drains running workers, highest
        number first, until `size` workers are wanted."""
        self.pay()
        if size != self.wanted:
            self.sizes.append((self._clock.now_s, size))
        # A draining worker cannot become ready again, so only workers that are off are started.
        while self.wanted < size and "off" in self._states:
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
        """Turns off the draining workers that have finished their requests."""
        self.pay()
        for number, state in enumerate(self._states):
            if state == "draining" and self._workers[number].is_idle:
                self._turn_off(number)

    def pay(self) -> float:
        """Returns the worker seconds that must be paid until now."""
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
