"""How much prefill each worker was given of late, and how fast it really is. Pure.

A router sees a worker's first tokens come. A worker computes its prompts one after another, so the
time between two of them, or since the later one was sent, is what the later one took. That says by
how much the worker is slower than it tells, and what its share of the work was in seconds:

    sent          the predicted seconds are added to its share
    first token   they are corrected to what was seen, and its pace is learned from the two
    time          a share counts half after `HALF_LIFE_S`

A prompt of which no first token is told counts as predicted.

Shares are kept in seconds of the moment when this was made, which shrink by the half-life: so a
share changes only when something happens to its worker, and nobody walks all of them as time goes
by. With several routers each keeps the shares of what it sent itself; where each of them is even,
the sum is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandem.cost_model import PrefillRate, WorkerRates
from tandem.rate_meters import LinearMeter

# Long against a prompt (seconds), so that one long prompt does not make a worker's share; short
# against the time in which pools are resized and habits of clients change.
HALF_LIFE_S = 300.0
REBASE_S = 100 * HALF_LIFE_S


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt on its way to its first token."""

    worker_id: str
    at_s: float
    told_s: float  # that it takes by the worker's own rates
    placed: float  # what it added to the worker's share
    may_pull: bool  # its time may be that of a pull: nothing is learned from it


@dataclass(slots=True)
class _Share:
    placed: float
    last_token_s: float = 0.0
    pace: LinearMeter = field(default_factory=lambda: LinearMeter((1.0,)))


class Shares:
    """`now_s` is any clock that never goes back, 0 about when this was made."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        self._origin_s = 0.0

    def second(self, now_s: float) -> float:
        """What one second of prefill counts in a share."""
        return float(2.0 ** ((now_s - self._origin_s) / HALF_LIFE_S))

    def rebase(self, now_s: float) -> bool:
        """Before numbers grow out of bounds, after days: all shares are new numbers then."""
        if now_s - self._origin_s < REBASE_S:
            return False
        scale = 1 / self.second(now_s)
        for share in self._shares.values():
            share.placed *= scale
        self._origin_s = now_s
        return True

    def join(self, worker_id: str, placed: float) -> None:
        """A new worker, or one that came back: with the mean share, so that not all goes to it."""
        self._shares[worker_id] = _Share(placed)

    def leave(self, worker_id: str) -> None:
        self._shares.pop(worker_id, None)

    def placed(self, worker_id: str) -> float:
        return self._shares[worker_id].placed

    def pace(self, worker_id: str) -> float:
        """Real seconds for each that the worker's rates predict."""
        return self._shares[worker_id].pace.coefficients[0]

    def sent(self, worker_id: str, told_s: float, now_s: float, *, may_pull: bool = False) -> Sent:
        """A prompt of `told_s` seconds by the worker's own rates goes there."""
        share = self._shares[worker_id]
        placed = told_s * self.pace(worker_id) * self.second(now_s)
        share.placed += placed
        return Sent(worker_id, now_s, told_s, placed, may_pull)

    def first_token(self, sent: Sent, worker_id: str, now_s: float) -> None:
        """It came from `worker_id`, which need not be who was chosen."""
        self._shares[sent.worker_id].placed -= sent.placed
        share = self._shares[worker_id]
        seen_s = now_s - max(sent.at_s, share.last_token_s)
        share.last_token_s = now_s
        share.placed += seen_s * self.second(now_s)
        if worker_id == sent.worker_id and not sent.may_pull and sent.told_s > 0:
            share.pace.observe((sent.told_s,), seen_s)


def paced(rates: WorkerRates, pace: float) -> WorkerRates:
    """The rates of a worker whose prefill takes `pace` times as long as it tells."""
    told = rates.prefill
    prefill = PrefillRate(told.step_s * pace, told.token_s * pace, told.token_context_s * pace)
    return msgspec.structs.replace(rates, prefill=prefill)
