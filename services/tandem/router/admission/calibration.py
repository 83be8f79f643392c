"""Learns from measured TTFTs by which factor TTFT predictions are wrong. Does no I/O.

Predictions omit some influences, such as other programs on the machine and the network. These
influences lengthen all long waits by about the same factor. So each prediction is multiplied by the
mean ratio measured / predicted of earlier requests. Example: 2 s were predicted and 3 s are
measured. This ratio of 1.5 has the weight 0.1, so a mean of 1.0 becomes 1.04.

- The mean is taken over the logarithms of the ratios, so that 2 and 1/2 cancel each other.
- The more the ratios vary, the smaller is the fraction of the limit that a prediction may use
  (`margin`). The fraction is chosen so that 99 of 100 accepted requests keep the limit.
- Short waits are not used: their ratios are dominated by a constant overhead.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from tandem.router.admission.predict import MARGIN

# The calibration uses only requests whose predicted TTFT is at least this fraction of their limit.
LEARNED_SHARE_MIN = 0.3
_LATE = 0.1  # weight of the newest ratio measured / predicted in the mean
# Smallest and largest ratio measured / predicted. A ratio of 10, for example, counts as 8.
_FACTORS = (0.5, 8.0)
# 99% of a normal distribution lies below mean + 2.33 standard deviations.
_SPREADS = 2.33
_MARGINS = (0.4, 0.85)


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted TTFT of an admitted request in seconds, and the time of the prediction."""

    predicted_s: float
    promised_at: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The learned correction of predictions. Immutable: `kept` returns an updated copy."""

    log_factor: float = 0.0
    # Variance of log(measured TTFT / predicted TTFT). The default makes `margin` equal to MARGIN.
    variance: float = (math.log(MARGIN) / _SPREADS) ** 2

    @property
    def margin(self) -> float:
        """Largest fraction of the limit that the corrected prediction of a request may use.

        Example: with a margin of 0.75 and a limit of 4 s, the prediction may be at most 3 s. The
        reserve of 1 s is for errors of the prediction.
        """
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self.variance))))

    @property
    def factor(self) -> float:
        """The factor by which a predicted TTFT must be multiplied."""
        return math.exp(self.log_factor)

    def promise(self, predicted_s: float, limit_s: float, now: float) -> Promise | None:
        """Returns the prediction to compare with the measured TTFT of an admitted request.

        Returns None if the prediction is too far below `limit_s`, the limit of the request's TTFT.
        """
        if self.factor * predicted_s < LEARNED_SHARE_MIN * limit_s:
            return None
        return Promise(predicted_s, now)

    def kept(self, promise: Promise, now: float) -> Self:
        """Returns the calibration updated by a request whose first token arrived at `now`.

        `promise` is the prediction that was made when the request was admitted.
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
