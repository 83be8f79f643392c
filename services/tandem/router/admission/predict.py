"""Predicts a placed request's time to first token, and returns the allowed one. Pure.

The prediction has these parts:
    the wait until the decode worker has a running slot and blocks, while other sequences end
    meanwhile and after that: the prompts in the queue of the worker that prefills it
    its own prompt; steps are longer because of the sequences that decode there
The decode worker decides where it is prefilled (`worker/decode/prefill_choice.py`): locally only if
that is clearly faster, including the delay of its running sequences. Rates and loads are assumed to
be inexact, so a part of the limit is reserved. While no worker has measured rates, no request is
refused.
"""

import math
from dataclasses import dataclass

from tandem.common.perf_model.predict import beside_decode, expect, is_local_faster
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import computing_s, slot_wait_s, with_likely_rates

OWN_TIMES = 2.0  # a prompt may wait this many times its own prefill time, whatever the limit is
MARGIN = 0.75  # usable share of the limit until the spread of predictions is known


@dataclass(frozen=True, slots=True)
class TtftLimit:
    """Longest time to first token that is still of use, by the length of the prompt."""

    base_s: float
    token_s: float = 0.0  # addition for each token of the prompt
    # The limit is at least this many times the prompt's own prefill time without a queue; otherwise
    # a long prompt would always be refused. 0: a strict limit, such as a service level.
    own_times: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


def expected_ttft_s(work: Work, placement: Placement, *, completion_tokens: float = 0.0) -> float:
    """Predicts the TTFT of a placed request from its workers' reports, in seconds.

    `completion_tokens` is the mean output of a request; with 0 (unknown), running slots are assumed
    to become free.
    """
    return _expect(work, placement, slot_wait_s(work, placement.decode, completion_tokens))[0]


def computing_worker(work: Work, placement: Placement) -> WorkerSnapshot:
    """Returns the worker that is expected to prefill the prompt.

    It is the first candidate or the decode worker, which makes the decision.
    """
    _, is_local = _expect(work, placement, 0.0)
    return placement.decode if is_local else placement.prefill_worker


def _expect(work: Work, placement: Placement, after_s: float) -> tuple[float, bool]:
    """Returns the seconds until the prompt is computed, and whether it is computed locally."""
    missing = placement.tokens_missing
    way = placement.decode.prefill_at
    if not placement.prefill_candidates:
        decode = with_likely_rates([placement.decode])[0]
        return _prefilled_s(work, decode, missing, after_s=after_s), True
    decode, *peers = with_likely_rates([placement.decode, *placement.prefill_candidates])
    remote_s = min(_prefilled_s(work, w, missing, after_s=after_s) for w in peers)
    if way == "remote":
        return remote_s, False
    local_s = _prefilled_s(work, decode, missing, after_s=after_s)
    delay_s = computing_s(work, decode, missing) * decode.load.num_running
    if way == "local" or is_local_faster(local_s + delay_s, remote_s):
        return local_s, True
    return remote_s, False


def keep_deadlines(placement: Placement) -> bool:
    """Returns whether all of its workers refuse requests that would be too late."""
    return all(w.keeps_deadlines for w in (placement.decode, *placement.prefill_candidates))


def allowed_s(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    *,
    slower: float = 1.0,
    margin: float = MARGIN,
) -> float:
    """Largest acceptable predicted TTFT in seconds; infinite if no worker has measured rates.

    `slower` scales the workers' reported times, and `margin` is the usable share of the limit.
    """
    workers = with_likely_rates([*placement.prefill_candidates, placement.decode])
    if not any(w.rates.measured for w in workers):
        return math.inf
    allowed = margin * limit.seconds(work.num_tokens)
    if limit.own_times:
        own_s = min(computing_s(work, w, placement.tokens_missing) for w in workers)
        allowed = max(allowed, limit.own_times * slower * own_s)
    return allowed


def _prefilled_s(work: Work, worker: WorkerSnapshot, missing: int, *, after_s: float) -> float:
    """Predicts the seconds until the worker has computed the prompt if it begins after
    `after_s`.
    """
    load = worker.load
    rates = beside_decode(worker.rates, load.chunk_tokens, load.num_running)
    cached = work.num_tokens - missing
    queue_s = load.queue_s(rates)  # a reported `queued_s` already includes the decode
    return expect(rates, work.num_tokens, cached, queue_s=queue_s, after_s=after_s).total_s
