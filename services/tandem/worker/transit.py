"""Finds how late a message comes, from its sender's monotonic clock.

Two hosts' clocks have an unknown difference. It is part of each message's age, as is the shortest
way. So a message is late by as much as it is older than the youngest one of its sender.
"""

import math
import time
from collections.abc import Callable

_DRIFT = 1e-3  # clocks may run apart by so many seconds a second, and a route may become longer


class Transit:
    """The messages of one sender."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._youngest_s = math.inf
        self._seen_at = -math.inf

    def late_s(self, sent_at_s: float) -> float:
        """Returns the seconds that a message which has just come is late; 0 without a time."""
        if not sent_at_s:
            return 0.0
        now = self._clock()
        age_s = now - sent_at_s
        drifted_s = _DRIFT * (now - self._seen_at) if self._seen_at > -math.inf else 0.0
        self._youngest_s = min(age_s, self._youngest_s + drifted_s)
        self._seen_at = now
        return age_s - self._youngest_s
