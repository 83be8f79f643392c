"""Decides whether a request is taken now, or refused early with the time to wait. Pure.

The router and the simulator both decide by `admit`. A request that would come too late anyway only
makes those behind it late too. Its time to first token is predicted (`predict.py`), corrected by
what came of earlier predictions (`calibration.py`), and compared with what is allowed.
"""

import math
from dataclasses import dataclass

from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import TtftLimit, allowed_s, expected_ttft_s, keep_deadlines
from tandem.router.placement.choose import Placement, Work


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """A decision says whether the request is taken, or by how much it would come too late."""

    late_s: float  # by which the first token would come too late; 0: the request is taken
    promise: Promise | None = None  # to be kept with a request that is taken, if it may teach
    within_s: float = math.inf  # a first token that comes later is of no use

    @property
    def is_admitted(self) -> bool:
        """True when the first token is expected in time, or when nothing is known."""
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
    """Decides on a placed request. Nobody is refused for a guess: without measured rates all are
    taken. Workers that keep deadlines decide narrow cases themselves, when a prompt is to begin.

    `ahead_s` is how long the request waits in the router first, `completion_tokens` is the mean
    of a request's output tokens (0: not known), and `now` is any clock in seconds.
    """
    factor = calibration.factor
    margin = calibration.margin
    within_s = allowed_s(work, placement, limit, slower=factor, margin=1.0)
    if within_s == math.inf:  # workers that keep deadlines measure before their records say so
        limit_s = limit.seconds(work.num_tokens)
        return AdmissionDecision(0.0, within_s=limit_s if keep_deadlines(placement) else math.inf)
    predicted_s = ahead_s + expected_ttft_s(work, placement, completion_tokens=completion_tokens)
    if keep_deadlines(placement):  # refused here is only what is late even if it is soon for once
        if factor * margin * predicted_s > within_s:
            return AdmissionDecision(factor * predicted_s - within_s)
    else:
        most_s = allowed_s(work, placement, limit, slower=factor, margin=margin)
        if (late_s := factor * predicted_s - most_s) > 0:
            return AdmissionDecision(late_s)
    promise = calibration.promise(predicted_s, limit.seconds(work.num_tokens), now)
    return AdmissionDecision(0.0, promise, within_s)
