"""Learns from measured TTFTs by which factor TTFT predictions are wrong. Does no I/O.

Predictions omit some influences, such as other programs on the machine and the network. These
influences lengthen all long waits by about the same factor. So later predictions are multiplied by
the mean of measured / predicted. Example: if 2 s were predicted and 3 s are measured, the ratio is
1.5, and its weight of 0.1 moves a factor of 1.0 to 1.04.

- The ratios are averaged as logarithms, so that 2 and 1/2 cancel each other.
- The spread of the ratios determines which fraction of the limit a prediction may use (`margin`),
  so that 99 of 100 accepted requests keep the limit.
- Only requests whose prediction is near the limit are used. A short wait on an idle cluster has a
  relatively large overhead, which does not apply to long waits.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from tandem.router.admission.predict import MARGIN

# Only predictions of at least this fraction of the limit are used. The fraction is a constant: if
# it shrank with `margin`, shorter waits would be used. Ratios of short waits vary more, which would
# shrink `margin` further.
LEARNED_SHARE_MIN = 0.3
_LATE = 0.1  # weight of the newest ratio in the mean
_FACTORS = (0.5, 8.0)  # smallest and largest ratio; ratios outside are replaced by the nearer one
_SPREADS = 2.33  # 99% of a normal distribution is less than this many deviations above the mean
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
    # variance of the logarithms of measured / predicted
    variance: float = (math.log(MARGIN) / _SPREADS) ** 2

    @property
    def margin(self) -> float:
        """Largest fraction of the limit that the corrected prediction of a request may use.

        The rest is a reserve, with which 99 of 100 accepted requests keep the limit.
        """
        lowest, highest = _MARGINS
        return min(highest, max(lowest, math.exp(-_SPREADS * math.sqrt(self.variance))))

    @property
    def factor(self) -> float:
        """Factor that corrects a predicted TTFT."""
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
