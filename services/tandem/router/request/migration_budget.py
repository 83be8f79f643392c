"""Limits how often requests migrate after the loss of a worker. Pure: `now` is an argument.

A request that makes its worker crash would take down one after the other; so each may lose
`LOSSES_MAX` workers, and all requests of a router together migrate as often in a minute as there
were requests in it: a crash migrates each of them once, and only crash after crash uses that up. A
worker that leaves in order costs nothing of either.
"""

from collections import Counter
from typing import Literal, get_args

# Workers of one request, prefill or decode: two migrations after crashes, then an error.
LOSSES_MAX = 3
MIGRATIONS_MIN = 10  # in a minute, however few requests there are
_WINDOW_S = 60

MigrationReason = Literal["crash", "drain"]
MIGRATION_REASONS: tuple[MigrationReason, ...] = get_args(MigrationReason)


class MigrationBudget:
    """Migrations after crashes in the last minute: as many as requests were open in it, or
    `MIGRATIONS_MIN`.

    Times are of one monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._ended = _LastMinute()
        self._migrations = _LastMinute()

    def begin(self) -> None:
        self._num_open += 1

    def end(self, now: float) -> None:
        self._num_open -= 1
        self._ended.add(now)

    def take(self, now: float) -> bool:
        """Returns whether one more request may migrate now, and counts it if so."""
        allowed = max(MIGRATIONS_MIN, self._num_open + self._ended.total(now))
        if self._migrations.total(now) >= allowed:
            return False
        self._migrations.add(now)
        return True


class _LastMinute:
    """Counts the events of the last minute, by the second."""

    def __init__(self) -> None:
        self._by_second: Counter[int] = Counter()

    def add(self, now: float) -> None:
        self._forget(now)
        self._by_second[int(now)] += 1

    def total(self, now: float) -> int:
        self._forget(now)
        return self._by_second.total()

    def _forget(self, now: float) -> None:
        for second in [s for s in self._by_second if s <= now - _WINDOW_S]:
            del self._by_second[second]
