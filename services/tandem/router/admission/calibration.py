"""Learns by how much predictions of TTFT are off, from the first tokens that followed. Pure.

    admitted, its prediction near the limit --first token--> seen / predicted --> factor

Whatever a model of the workers leaves out (another tenant of the machine, a network, kernels that
slow each other down) lengthens all waits near the limit by about the same share. Only those count
that were predicted to be near it: what an idle cluster adds to a short wait says nothing about a
long one. Seen ratios are averaged as logarithms, so that twice and half outweigh each other. Their
spread says how much of a limit must be kept back for 99 of 100 to be in time.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

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
    """The predicted TTFT of an admitted request, and when it was predicted, in seconds."""

    predicted_s: float
    promised_at: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration is what was learned so far, as plain data; `kept` answers the next one."""

    log_factor: float = 0.0
    variance: float = (math.log(MARGIN) / _SPREADS) ** 2  # of the logarithms

    @property
    def margin(self) -> float:
        """Largest share of a limit that a prediction may have, for 99 of 100 to keep the limit."""
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self.variance))))

    @property
    def factor(self) -> float:
        """Factor that corrects a predicted TTFT."""
        return math.exp(self.log_factor)

    def promise(self, predicted_s: float, limit_s: float, now: float) -> Promise | None:
        """Returns the promise of an admitted request; None if it is too short to learn from."""
        if self.factor * predicted_s < NEAR * limit_s:
            return None
        return Promise(predicted_s, now)

    def kept(self, promise: Promise, now: float) -> Self:
        """The calibration after the first token of a promised request came."""
        seen_s = max(1e-3, now - promise.promised_at)
        off = math.log(seen_s / max(1e-3, promise.predicted_s))
        lowest, highest = map(math.log, _FACTORS)
        error = min(highest, max(lowest, off)) - self.log_factor
        return replace(
            self,
            log_factor=self.log_factor + _LATE * error,
            variance=self.variance + _LATE / 2 * (error * error - self.variance),
        )
