"""Learns by which factor TTFT predictions are wrong, from measured TTFTs. Does no I/O.

    admitted with a prediction near the limit --first token--> measured / predicted --> factor
Influences that the performance model of the workers omits (another tenant of the machine, the
network, kernels that slow each other down) lengthen all waits near the limit by about the same
factor. Only requests whose prediction is near the limit are used, because the overhead of a short
wait on an idle cluster does not apply to a long one. The ratios measured / predicted are averaged
as logarithms, so that 2 and 1/2 cancel each other. The spread of the logarithms determines how much
of the limit is kept in reserve, so that 99 of 100 requests keep the limit.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from tandem.router.admission.predict import MARGIN

# Only predictions of at least this fraction of the limit are used. The fraction does not depend on
# `margin`. Otherwise, with a smaller margin, shorter waits would be used, too. Their spread is
# larger, so the margin would never grow again.
LEARNED_SHARE_MIN = 0.3
_LATE = 0.1  # weight of the newest ratio
_FACTORS = (0.5, 8.0)  # smallest and largest factor; a larger error has another cause
_SPREADS = 2.33  # 99% of a normal distribution is below this many standard deviations
_MARGINS = (0.4, 0.85)


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted TTFT of an admitted request in seconds, and the time of the prediction."""

    predicted_s: float
    promised_at: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The learned correction of predictions. It is immutable; `kept` returns the next one."""

    log_factor: float = 0.0
    # variance of the logarithms of measured / predicted
    variance: float = (math.log(MARGIN) / _SPREADS) ** 2

    @property
    def margin(self) -> float:
        """Largest fraction of a limit that a prediction may reach to be accepted.

        With this reserve, 99 of 100 accepted requests keep the limit.
        """
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self.variance))))

    @property
    def factor(self) -> float:
        """Factor that corrects a predicted TTFT."""
        return math.exp(self.log_factor)

    def promise(self, predicted_s: float, limit_s: float, now: float) -> Promise | None:
        """Returns the promise of an admitted request; None if its TTFT is too short to learn from.

        `limit_s` is the limit of the request's TTFT.
        """
        if self.factor * predicted_s < LEARNED_SHARE_MIN * limit_s:
            return None
        return Promise(predicted_s, now)

    def kept(self, promise: Promise, now: float) -> Self:
        """Returns the calibration after a first token that arrived at `now`.

        `promise` is the prediction that was made when the token's request was admitted.
        """
        seen_s = max(1e-3, now - promise.promised_at)
        off = math.log(seen_s / max(1e-3, promise.predicted_s))
        lowest, highest = map(math.log, _FACTORS)
        error = min(highest, max(lowest, off)) - self.log_factor
        return replace(
            self,
            log_factor=self.log_factor + _LATE * error,
            variance=self.variance + _LATE / 2 * (error * error - self.variance),
        )
