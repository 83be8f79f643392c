"""Decides whether a request is accepted, or refused early with a time to wait. Does no I/O.

The router and the simulator both decide by `admit`. A request whose first token would be too late
anyway would only delay the requests behind it. So each request's time to first token is predicted
(`predict.py`), corrected by the outcome of earlier predictions (`calibration.py`), and compared
with the limit.
"""

import math
from dataclasses import dataclass

from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import TtftLimit, allowed_s, expected_ttft_s, keep_deadlines
from tandem.router.placement.choose import Placement, Work


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The decision about one request."""

    late_s: float  # seconds by which the first token would be too late; 0: the request is accepted
    # prediction for an accepted request; None: the calibration cannot learn from it
    promise: Promise | None = None
    within_s: float = math.inf  # seconds after which the first token is of no use

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
) -> AdmissionDecision:
    """Decides about a placed request. Without measured rates, every request is accepted.

    Workers that keep deadlines decide borderline cases themselves, just before they would begin the
    prompt. `ahead_s` is the time that the request waits in the router before it is submitted.
    `completion_tokens` is the mean number of output tokens of a request (0 if unknown). `now` is in
    seconds, on the same clock as that of `Calibration.kept`.
    """
    factor = calibration.factor
    margin = calibration.margin
    within_s = allowed_s(work, placement, limit, slower=factor, margin=1.0)
    # No record contains measured rates. The workers themselves may already have measured theirs, so
    # workers that keep deadlines receive the limit.
    if within_s == math.inf:
        limit_s = limit.seconds(work.num_tokens)
        return AdmissionDecision(0.0, within_s=limit_s if keep_deadlines(placement) else math.inf)
    predicted_s = ahead_s + expected_ttft_s(work, placement, completion_tokens=completion_tokens)
    # Refuse only requests that would be late even if the prediction is too long by its usual error.
    if keep_deadlines(placement):
        if factor * margin * predicted_s > within_s:
            return AdmissionDecision(factor * predicted_s - within_s)
    else:
        most_s = allowed_s(work, placement, limit, slower=factor, margin=margin)
        if (late_s := factor * predicted_s - most_s) > 0:
            return AdmissionDecision(late_s)
    promise = calibration.promise(predicted_s, limit.seconds(work.num_tokens), now)
    return AdmissionDecision(0.0, promise, within_s)
