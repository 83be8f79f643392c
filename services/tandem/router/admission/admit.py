"""Refuses requests whose first token would be too late to be of use. Does no I/O.

Such a request would only delay the requests behind it. `admit` predicts a request's time to first
token, TTFT (`predict.py`), multiplies the prediction by a correction that was learned from earlier
requests (`calibration.py`), and compares the result with the limit of the TTFT. The router and the
simulator both call `admit`.
"""

import math
from dataclasses import dataclass

from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.predict import TtftLimit, allowed_s, expected_ttft_s, keep_deadlines
from tandem.router.placement.choose import Placement, Work

_LATE_MIN_S = 1e-3  # of a refusal, so that it has a time to come back


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Says whether a request is accepted, and by how many seconds its first token would be late."""

    late_s: float  # seconds by which the first token would be too late; 0: the request is accepted
    # The request's predicted TTFT. The calibration compares it with the measured TTFT later. None:
    # the calibration does not use this request.
    promise: Promise | None = None
    # Longest useful TTFT in seconds, which the router sends to the workers. Workers that keep
    # deadlines refuse the request if its first token would be later.
    within_s: float = math.inf

    @property
    def is_admitted(self) -> bool:
        """True if the first token is expected in time, or if no prediction is possible."""
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
    waited_s: float = 0.0,
) -> AdmissionDecision:
    """Decides about a placed request. Every request is accepted until a worker reports its rates.

    Workers that keep deadlines refuse a late request themselves, just before they would compute its
    prompt. If all workers of the placement do so, this function refuses only a request that is
    clearly late.

    `waited_s` is the time since the request arrived, and `ahead_s` is the time that it will wait in
    the router before it is submitted.
    `completion_tokens` is the mean number of output tokens of a request (0 if unknown). `now` is in
    seconds, on the same clock as `now` of `Calibration.kept`.
    """
    factor = calibration.factor
    margin = calibration.margin
    within_s = allowed_s(work, placement, limit, slower=factor, margin=1.0)
    # No worker has reported measured rates, so the router cannot predict the TTFT. The workers
    # receive the limit nevertheless: they may have measured their rates since their last report.
    if within_s == math.inf:
        limit_s = limit.seconds(work.num_tokens)
        return AdmissionDecision(0.0, within_s=limit_s if keep_deadlines(placement) else math.inf)
    predicted_s = ahead_s + expected_ttft_s(work, placement, completion_tokens=completion_tokens)
    # The workers refuse late requests themselves, so the router refuses only clearly late ones.
    # Example: with margin 0.75 and a limit of 3 s, predictions above 4 s are refused.
    if keep_deadlines(placement):
        if waited_s + factor * margin * predicted_s > within_s:
            return AdmissionDecision(max(_LATE_MIN_S, waited_s + factor * predicted_s - within_s))
    else:
        most_s = allowed_s(work, placement, limit, slower=factor, margin=margin)
        if (late_s := waited_s + factor * predicted_s - most_s) > 0:
            return AdmissionDecision(late_s)
    promise = calibration.promise(predicted_s, limit.seconds(work.num_tokens), now)
    return AdmissionDecision(0.0, promise, within_s)
