"""Predicts the time to first token (TTFT) of a placed request, and computes its limit. No I/O.

    TTFT = max(slot wait, prefill queue) + prompt
    slot wait        seconds until the decode worker has a free running slot and enough KV blocks
    prefill queue    seconds that the worker that prefills needs for the prompts in its queue
    prompt           seconds that the same worker needs for the request's prompt
Example: a slot wait of 2 s, a prefill queue of 3 s and a prompt of 1 s give a TTFT of 4 s.

The decode worker decides where the prompt is prefilled (`worker/decode/prefill_choice.py`). The
decode worker prefills the prompt itself only if that is clearly faster than a prefill worker. A
local prefill delays the decode worker's running sequences, and this delay counts as part of its
time. The prediction assumes the same choice.

Reported rates and loads are inexact, so a request is accepted only if its prediction is below a
fraction of the limit, such as 75%. While no worker has measured its rates, no request is refused.
"""

import math
from dataclasses import dataclass

from tandem.common.perf_model.predict import beside_decode, expect, is_local_faster
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import computing_s, slot_wait_s, with_likely_rates

OWN_TIMES = 2.0  # the router's value of `TtftLimit.own_times`
# Largest fraction of the TTFT limit that a prediction may use, until the calibration has measured
# the errors of predictions.
MARGIN = 0.75


@dataclass(frozen=True, slots=True)
class TtftLimit:
    """The longest useful time to first token. It depends on the length of the prompt."""

    base_s: float
    token_s: float = 0.0  # seconds added to the limit for each token of the prompt
    # The limit is at least this many times the prompt's prefill time on an idle worker, so that an
    # idle cluster accepts every prompt. Example: a prompt that takes 10 s has a limit of at least
    # 20 s with 2.0. 0: the limit depends only on `base_s` and `token_s`.
    own_times: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


def expected_ttft_s(work: Work, placement: Placement, *, completion_tokens: float = 0.0) -> float:
    """Predicts the TTFT of a placed request from its workers' reports, in seconds.

    `completion_tokens` is the mean number of output tokens of a request. If it is 0 (unknown), the
    wait for a running slot is assumed to be 0.
    """
    return _expect(work, placement, slot_wait_s(work, placement.decode, completion_tokens))[0]


def computing_worker(work: Work, placement: Placement) -> WorkerSnapshot:
    """Returns the worker that is expected to prefill the prompt.

    The result is the first prefill candidate or the decode worker itself. The decode worker may
    choose differently later.
    """
    _, is_local = _expect(work, placement, 0.0)
    return placement.decode if is_local else placement.prefill_worker


def _expect(work: Work, placement: Placement, after_s: float) -> tuple[float, bool]:
    """Returns (seconds until the prompt is computed, whether the decode worker computes it).

    The prompt's computation begins in `after_s` seconds at the earliest.
    """
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
    delay_s = computing_s(work, decode, missing) * decode.load.num_others
    if way == "local" or is_local_faster(local_s + delay_s, remote_s):
        return local_s, True
    return remote_s, False


def keep_deadlines(placement: Placement) -> bool:
    """Returns whether all workers of a placement refuse a request that would miss its limit."""
    return all(w.keeps_deadlines for w in (placement.decode, *placement.prefill_candidates))


def allowed_s(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    *,
    slower: float = 1.0,
    margin: float = MARGIN,
) -> float:
    """Returns the largest acceptable predicted TTFT in seconds.

    The result is infinite if no worker has measured its rates. `slower` is the factor by which the
    workers are slower than they report. `margin` is the fraction of the limit that a prediction
    may use.
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
    """Predicts the seconds until the worker has computed the prompt.

    The prompt's computation begins in `after_s` seconds at the earliest.
    """
    load = worker.load
    rates = beside_decode(worker.rates, load.chunk_tokens, load.num_others)
    cached = work.num_tokens - missing
    queue_s = load.queue_s(rates)  # includes the decode steps between the queue's prefill chunks
    return expect(rates, work.num_tokens, cached, queue_s=queue_s, after_s=after_s).total_s
