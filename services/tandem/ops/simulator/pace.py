"""Learns the true speed of simulated workers from the times of first tokens. Does no I/O.

A real worker measures its steps and reports its true rates. A simulated worker always reports its
nominal rates, so the router's view estimates the true speed: a worker's pace is the number of
observed seconds per predicted second. For example, a pace of 1.2 means that prompts take 20% longer
than the nominal rates predict.

A worker computes prompts one after another. So the observed seconds of a prompt begin when the
worker begins the prompt: at the worker's previous first token, or when the prompt was sent if that
was later. They end at the prompt's first token. Example of a worker with pace 1:

    time   event                                              observed     predicted
    10 s   prompt A is sent                                                2 s
    11 s   prompt B is sent                                                2 s
    13 s   first token of A                                   13 - 10 = 3 s
    15 s   first token of B (later than its sending at 11)    15 - 13 = 2 s

A worker's prefill share (recent seconds of prefill, shares.py) is corrected in the same way. When a
prompt is sent, its predicted seconds (times the pace) are added to the share. At the first token,
the observed seconds replace them.
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
    predicted_s: float  # prefill seconds that the worker's nominal rates predict
    counted_s: float  # seconds that were added to the worker's prefill share for this prompt
    # True: the worker may pull blocks, which changes the observed time. The pace then ignores this
    # prompt.
    may_pull: bool


@dataclass(slots=True)
class _Observed:
    last_token_s: float = 0.0
    pace: LinearMeter = field(default_factory=lambda: LinearMeter((1.0,)))


class Paces:
    """Learns the pace of each worker. Corrects the workers' prefill shares: at the first token of a
    prompt, the observed seconds replace the predicted ones."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._seen: dict[str, _Observed] = {}

    def join(self, worker_id: str) -> None:
        """Sets the pace of a new or restarted worker to 1."""
        self._seen[worker_id] = _Observed()

    def of(self, worker_id: str) -> float:
        """Returns the worker's pace: observed seconds per predicted second."""
        return self._seen[worker_id].pace.coefficients[0]

    def sent(
        self, worker_id: str, predicted_s: float, now_s: float, *, may_pull: bool = False
    ) -> Sent:
        """Records that a prompt was sent to a worker. `predicted_s` is the prefill time that the
        worker's reported rates predict."""
        counted_s = predicted_s * self.of(worker_id)
        self._shares.sent(worker_id, counted_s, now_s)
        return Sent(worker_id, now_s, predicted_s, counted_s, may_pull)

    def first_token(self, sent: Sent, worker_id: str, now_s: float) -> None:
        """Records the first token of a prompt. `worker_id` is the worker that computed the token.
        It may differ from `sent.worker_id`, the worker to which the prompt was sent."""
        self._shares.sent(sent.worker_id, -sent.counted_s, sent.at_s)
        seen = self._seen[worker_id]
        seen_s = now_s - max(sent.at_s, seen.last_token_s)
        seen.last_token_s = now_s
        self._shares.sent(worker_id, seen_s, now_s)
        if worker_id == sent.worker_id and not sent.may_pull and sent.predicted_s > 0:
            seen.pace.observe((sent.predicted_s,), seen_s)


def paced(rates: WorkerRates, pace: float) -> WorkerRates:
    """Returns rates whose prefill times are `pace` times as long."""
    return msgspec.structs.replace(rates, prefill=rates.prefill.stretched(pace))
