"""Learns the true speed of simulated workers from first tokens. Pure.

A real worker measures its own steps and tells its true rates; simulated ones go on telling their
nominal ones. What a real one would have measured is learned here instead: a worker computes its
prompts one after another, so the time between two first tokens, or since the later prompt was sent,
is what the later one took.

    sent          the predicted seconds are added to the worker's share
    first token   they are corrected to what was seen, and its pace is learned from the two

A prompt of which no first token is told counts as predicted.
"""

from dataclasses import dataclass, field

import msgspec

from tandem.common.perf_model.meters import LinearMeter
from tandem.common.perf_model.rates import WorkerRates
from tandem.router.placement.shares import Shares


@dataclass(frozen=True, slots=True)
class Sent:
    """This is a prompt on its way to its first token."""

    worker_id: str
    at_s: float
    told_s: float  # that it takes by the worker's own rates
    counted_s: float  # what was added to the worker's share
    may_pull: bool  # its time may be that of a pull: nothing is learned from it


@dataclass(slots=True)
class _Seen:
    last_token_s: float = 0.0
    pace: LinearMeter = field(default_factory=lambda: LinearMeter((1.0,)))


class Paces:
    """This corrects the shares by what was seen, and learns each worker's pace."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._seen: dict[str, _Seen] = {}

    def join(self, worker_id: str) -> None:
        """Nothing is known of a new worker, or of one that came back."""
        self._seen[worker_id] = _Seen()

    def of(self, worker_id: str) -> float:
        """The pace is the real seconds for each that the worker's rates predict."""
        return self._seen[worker_id].pace.coefficients[0]

    def sent(self, worker_id: str, told_s: float, now_s: float, *, may_pull: bool = False) -> Sent:
        """Notes a prompt that goes there and takes `told_s` seconds by the worker's own rates."""
        counted_s = told_s * self.of(worker_id)
        self._shares.sent(worker_id, counted_s, now_s)
        return Sent(worker_id, now_s, told_s, counted_s, may_pull)

    def first_token(self, sent: Sent, worker_id: str, now_s: float) -> None:
        """Notes the first token. It came from `worker_id`, which need not be the chosen worker."""
        self._shares.sent(sent.worker_id, -sent.counted_s, sent.at_s)
        seen = self._seen[worker_id]
        seen_s = now_s - max(sent.at_s, seen.last_token_s)
        seen.last_token_s = now_s
        self._shares.sent(worker_id, seen_s, now_s)
        if worker_id == sent.worker_id and not sent.may_pull and sent.told_s > 0:
            seen.pace.observe((sent.told_s,), seen_s)


def paced(rates: WorkerRates, pace: float) -> WorkerRates:
    """A worker whose prefill takes `pace` times as long as it tells has these rates."""
    return msgspec.structs.replace(rates, prefill=rates.prefill.stretched(pace))
