"""Learns the error of TTFT predictions from the first tokens that followed. Pure.

    admitted with a prediction near the limit --first token--> measured / predicted --> factor
Influences that the model of the workers omits (another tenant of the machine, the network, kernels
that slow each other down) lengthen all waits near the limit by about the same factor. Only requests
whose prediction is near the limit are used, because the overhead of a short wait on an idle cluster
does not apply to a long one. The ratios are averaged as logarithms, so that double and half cancel
each other. Their spread determines the share of the limit to reserve so that 99 of 100 are in time.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from tandem.router.admission.predict import MARGIN

# Predictions from this share of the limit on are used. The share does not depend on `margin`: a
# smaller margin would admit shorter waits, whose spread is larger, and the margin would never grow
# again.
LEARNED_SHARE_MIN = 0.3
_LATE = 0.1  # weight of the newest ratio
_FACTORS = (0.5, 8.0)  # bounds of the factor; a larger error has another cause
_SPREADS = 2.33  # 99% of a normal distribution is below this many standard deviations
_MARGINS = (0.4, 0.85)


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted TTFT of an admitted request in seconds, and the time of the prediction."""

    predicted_s: float
    promised_at: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The learned correction, as plain data; `kept` returns the next one."""

    log_factor: float = 0.0
    variance: float = (math.log(MARGIN) / _SPREADS) ** 2  # variance of the logarithms

    @property
    def margin(self) -> float:
        """Largest share of a limit that a prediction may use, so that 99 of 100 keep the limit."""
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self.variance))))

    @property
    def factor(self) -> float:
        """Factor that corrects a predicted TTFT."""
        return math.exp(self.log_factor)

    def promise(self, predicted_s: float, limit_s: float, now: float) -> Promise | None:
        """Returns the promise of an admitted request; None if it is too short to learn from."""
        if self.factor * predicted_s < LEARNED_SHARE_MIN * limit_s:
            return None
        return Promise(predicted_s, now)

    def kept(self, promise: Promise, now: float) -> Self:
        """Returns the calibration after the first token of a promised request."""
        seen_s = max(1e-3, now - promise.promised_at)
        off = math.log(seen_s / max(1e-3, promise.predicted_s))
        lowest, highest = map(math.log, _FACTORS)
        error = min(highest, max(lowest, off)) - self.log_factor
        return replace(
            self,
            log_factor=self.log_factor + _LATE * error,
            variance=self.variance + _LATE / 2 * (error * error - self.variance),
        )
