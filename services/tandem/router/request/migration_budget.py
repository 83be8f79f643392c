"""Limits migrations after crashes, so that a bad request cannot crash all workers. Does no I/O.

Two limits apply:
- One request fails when it has lost `LOSSES_MAX` workers.
- The number of migrations in a minute is at most the number of requests in that minute, over all
  requests of a router. Example: 100 requests run on one worker, which crashes. All 100 requests
  may migrate to another worker. If they crash this worker too within a minute, no request migrates
  again.
Migrations away from a draining worker are not counted.
"""

from collections import Counter
from typing import Literal, get_args

# A request fails at the crash of its third worker, prefill and decode workers together. After the
# first and the second crash, the request migrates.
LOSSES_MAX = 3
MIGRATIONS_MIN = 10  # this many migrations a minute are always allowed
_WINDOW_S = 60

MigrationReason = Literal["crash", "drain"]
MIGRATION_REASONS: tuple[MigrationReason, ...] = get_args(MigrationReason)


class MigrationBudget:
    """Counts migrations after crashes in the last minute, and limits them.

    The limit is the number of requests that ran at any time in the last minute, or `MIGRATIONS_MIN`
    if that is more. All times are in seconds on one monotonic clock.
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
        """Counts a migration and returns True, or returns False if the limit is reached."""
        allowed = max(MIGRATIONS_MIN, self._num_open + self._ended.total(now))
        if self._migrations.total(now) >= allowed:
            return False
        self._migrations.add(now)
        return True


class _LastMinute:
    """Counts the events of the last minute in buckets of one second."""

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
