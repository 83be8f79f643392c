"""Simulated time. Actions are planned for a time, and run in the order of these times. Actions for
the same time run in the order in which they were planned."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Clock:
    """The simulated time `now_s`, and the planned actions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._planned, (max(at_s, self.now_s), next(self._numbers), action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + delay_s, action, *arguments)

    def run(self) -> None:
        """Runs the planned actions until none is left. An action may plan further actions."""
        while self._planned:
            self.now_s, _, action, arguments = heappop(self._planned)
            action(*arguments)
