"""Measures how late messages arrive, by their sender's monotonic clock.

The age of a message is the receiver's clock at its arrival minus the sender's clock at its sending.
The two clocks differ by an unknown offset, so every age contains this offset and the shortest
possible delay. A message is therefore late by its age minus the smallest age of the sender's
messages. For example, three messages have the ages 100.002 s, 100.001 s and 100.050 s. The third
one is late by 0.049 s.
"""

import math
import time
from collections.abc import Callable

# The recorded smallest age grows by this many seconds in each second. Otherwise all messages would
# count as late after the two clocks have drifted apart or a slower network route is in use.
_DRIFT = 1e-3


class Transit:
    """Measures how late the messages of one sender arrive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._youngest_s = math.inf
        self._seen_at = -math.inf

    def late_s(self, sent_at_s: float) -> float:
        """Returns by how many seconds a message that has just arrived is late.

        Returns 0 if the message has no send time (`sent_at_s` is 0).
        """
        if not sent_at_s:
            return 0.0
        now = self._clock()
        age_s = now - sent_at_s
        drifted_s = _DRIFT * (now - self._seen_at) if self._seen_at > -math.inf else 0.0
        self._youngest_s = min(age_s, self._youngest_s + drifted_s)
        self._seen_at = now
        return age_s - self._youngest_s
