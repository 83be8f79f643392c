"""Decides whether a request is accepted, or refused early with a time to wait. Pure.

The router and the simulator both decide by `admit`. A request whose first token would be too late
anyway would only delay the requests behind it. Its time to first token is predicted (`predict.py`),
corrected by the outcome of earlier predictions (`calibration.py`), and compared with the limit.
"""

import math
from dataclasses import dataclass

from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import TtftLimit, allowed_s, expected_ttft_s, keep_deadlines
from tandem.router.placement.choose import Placement, Work


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one request."""

    late_s: float  # seconds by which the first token would be too late; 0: the request is accepted
    # the prediction of an accepted request if the calibration can learn from it
    promise: Promise | None = None
    within_s: float = math.inf  # seconds after which a first token is of no use

    @property
    def is_admitted(self) -> bool:
        """True if the first token is expected in time or nothing is known about the workers."""
        return not self.late_s


def admit(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    calibration: Calibration,
    *,
    ahead_s: float,
    completion_tokens: float,
    now: float,
) -> Decision:
    """Decides about a placed request. Without measured rates, every request is accepted.

    Workers that keep deadlines decide borderline cases themselves, when a prompt is about to begin.
    `ahead_s` is the time that the request waits in the router first. `completion_tokens` is the
    mean number of output tokens of a request (0 if unknown). `now` is the time of any clock in
    seconds.
    """
    factor = calibration.factor
    margin = calibration.margin
    within_s = allowed_s(work, placement, limit, slower=factor, margin=1.0)
    if within_s == math.inf:  # these workers have measured rates before their records contain them
        limit_s = limit.seconds(work.num_tokens)
        return Decision(0.0, within_s=limit_s if keep_deadlines(placement) else math.inf)
    predicted_s = ahead_s + expected_ttft_s(work, placement, completion_tokens=completion_tokens)
    # refuse only requests that are late even with a favourable error of the prediction
    if keep_deadlines(placement):
        if factor * margin * predicted_s > within_s:
            return Decision(factor * predicted_s - within_s)
    else:
        most_s = allowed_s(work, placement, limit, slower=factor, margin=margin)
        if (late_s := factor * predicted_s - most_s) > 0:
            return Decision(late_s)
    promise = calibration.promise(predicted_s, limit.seconds(work.num_tokens), now)
    return Decision(0.0, promise, within_s)
