"""Learns the true speed of simulated workers from first tokens. Does no I/O.

A real worker measures its steps and reports its true rates. Simulated workers always report their
nominal rates, so the router's view estimates the true speed instead: a worker's pace is the number
of observed seconds per predicted second. A worker computes prompts one after another. The observed
seconds of a prompt therefore start at the worker's previous first token, or when the prompt was
sent if that was later, and end at the prompt's first token.

The pace and the worker's prefill share (shares.py: recent seconds of prefill) change at two events:

    prompt sent   The predicted seconds are added to the prefill share.
    first token   In the prefill share, the observed seconds replace the predicted ones. The pace is
                  updated.

A prompt without a first token keeps its predicted seconds.
"""

from dataclasses import dataclass, field

import msgspec

from tandem.common.perf_model.meters import LinearMeter
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.placement.shares import Shares


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that was sent to a worker and has no first token yet."""

    worker_id: str
    at_s: float
    predicted_s: float  # prefill time predicted from the rates that the worker reports
    counted_s: float  # seconds added to the worker's prefill share
    may_pull: bool  # True: a pull may change the prefill time, so the pace is not updated.


@dataclass(slots=True)
class _Observed:
    last_token_s: float = 0.0
    pace: LinearMeter = field(default_factory=lambda: LinearMeter((1.0,)))


class Paces:
    """Corrects the workers' prefill shares to observed times, and learns each worker's pace."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._seen: dict[str, _Observed] = {}

    def join(self, worker_id: str) -> None:
        """Resets the pace of a worker that is new or has restarted."""
        self._seen[worker_id] = _Observed()

    def of(self, worker_id: str) -> float:
        """Returns the worker's pace: observed seconds per predicted second."""
        return self._seen[worker_id].pace.coefficients[0]

    def sent(
        self, worker_id: str, predicted_s: float, now_s: float, *, may_pull: bool = False
    ) -> Sent:
        """Records a prompt sent to a worker. `predicted_s` is the prefill time that the worker's
        reported rates predict."""
        counted_s = predicted_s * self.of(worker_id)
        self._shares.sent(worker_id, counted_s, now_s)
        return Sent(worker_id, now_s, predicted_s, counted_s, may_pull)

    def first_token(self, sent: Sent, worker_id: str, now_s: float) -> None:
        """Records the first token of a prompt. `worker_id` is the worker that computed the token;
        the prompt may have been sent to another one."""
        self._shares.sent(sent.worker_id, -sent.counted_s, sent.at_s)
        seen = self._seen[worker_id]
        seen_s = now_s - max(sent.at_s, seen.last_token_s)
        seen.last_token_s = now_s
        self._shares.sent(worker_id, seen_s, now_s)
        if worker_id == sent.worker_id and not sent.may_pull and sent.predicted_s > 0:
            seen.pace.observe((sent.predicted_s,), seen_s)


def paced(rates: WorkerRates, pace: float) -> WorkerRates:
    """Returns the rates with prefill times multiplied by `pace`."""
    return msgspec.structs.replace(rates, prefill=rates.prefill.stretched(pace))
