"""By how much predicted times to first token are off, learned from what came of them. Pure.

    admitted, its prediction near the limit --first token--> seen / predicted --> factor

Whatever a model of the workers leaves out (another tenant of the machine, a network, kernels that
slow each other down) lengthens all waits near the limit by about the same share. Only those count
that were predicted to be near it: what an idle cluster adds to a short wait says nothing about a
long one. Seen ratios are averaged as logarithms, so that twice and half outweigh each other. Their
spread says how much of a limit must be kept back for 99 of 100 to be in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.router.admission.predict import MARGIN

# Of the limit: predictions from there on count. Not of what is allowed: with a smaller margin
# shorter waits would count, whose spread is larger, and the margin would never grow again.
NEAR = 0.3
_LATE = 0.1  # the weight of the newest
_FACTORS = (0.5, 8.0)  # one that is off by more has another cause
_SPREADS = 2.33  # standard deviations that 99% are below
_MARGINS = (0.4, 0.85)


@dataclass(frozen=True, slots=True)
class Promise:
    """What was predicted of a request when it was taken. Seconds."""

    predicted_s: float
    made_at: float


class Calibration:
    """One a router."""

    def __init__(self) -> None:
        self._log_factor = 0.0
        self._variance = (math.log(MARGIN) / _SPREADS) ** 2  # of the logarithms

    @property
    def margin(self) -> float:
        """The share of a limit that a prediction may be, for 99 of 100 to keep it."""
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self._variance))))

    @property
    def factor(self) -> float:
        """What a prediction is to be multiplied with."""
        return math.exp(self._log_factor)

    def promise(self, predicted_s: float, limit_s: float, now: float) -> Promise | None:
        """To be kept with a request that is taken; None: it will say nothing."""
        if self.factor * predicted_s < NEAR * limit_s:
            return None
        return Promise(predicted_s, now)

    def kept(self, promise: Promise, now: float) -> None:
        """Its first token came."""
        seen_s = max(1e-3, now - promise.made_at)
        off = math.log(seen_s / max(1e-3, promise.predicted_s))
        lowest, highest = map(math.log, _FACTORS)
        error = min(highest, max(lowest, off)) - self._log_factor
        self._log_factor += _LATE * error
        self._variance += _LATE / 2 * (error * error - self._variance)
