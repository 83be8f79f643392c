"""How often requests may move after a worker was lost under them. Pure: `now` is an argument.

A request that makes its worker crash would take down one after the other; so each may lose
`LOSSES_MAX` workers, and all requests of a router together move as often in a minute as there were
requests in it: a crash moves each of them once, and only crash after crash uses that up. A worker
that leaves in order costs nothing of either.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, get_args

LOSSES_MAX = 3  # workers of one request, prefill or decode: two moves after crashes, then an error
MOVES_MIN = 10  # in a minute, however few requests there are
_WINDOW_S = 60

MoveReason = Literal["crash", "drain"]
MOVE_REASONS: tuple[MoveReason, ...] = get_args(MoveReason)


class MoveBudget:
    """Moves after crashes in the last minute: as many as requests were open in it, or `MOVES_MIN`.

    Times are of one monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._ended = _LastMinute()
        self._moved = _LastMinute()

    def begin(self) -> None:
        self._num_open += 1

    def end(self, now: float) -> None:
        self._num_open -= 1
        self._ended.add(now)

    def take(self, now: float) -> bool:
        """Whether one more may move now; if so it is counted."""
        allowed = max(MOVES_MIN, self._num_open + self._ended.total(now))
        if self._moved.total(now) >= allowed:
            return False
        self._moved.add(now)
        return True


class _LastMinute:
    """Counts what happened in it, by the second."""

    def __init__(self) -> None:
        self._by_second: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        self._forget(now)
        second = int(now)
        count = 0
        if self._by_second and self._by_second[-1][0] == second:
            count = self._by_second.pop()[1]
        self._by_second.append((second, count + 1))
        self._total += 1

    def total(self, now: float) -> int:
        self._forget(now)
        return self._total

    def _forget(self, now: float) -> None:
        while self._by_second and self._by_second[0][0] <= now - _WINDOW_S:
            self._total -= self._by_second.popleft()[1]
