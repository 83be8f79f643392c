"""Predicts a placed request's time to first token, and names the allowed one. Pure.

The prediction has these parts:

    until the decode worker has a running slot for it, and blocks: so many others must end first
    meanwhile, and after that: the prompts queued where it is prefilled
    its own prompt; steps are longer by those who decode there

The decode worker decides where it is prefilled (`worker/decode/prefill_choice.py`): by itself only
if that is clearly faster, the delay of all who decode there counted in. Rates and load are believed
to be off, so a part of the limit is kept back; and while nobody has measured anything, nobody is
refused for a guess.
"""

import math
from dataclasses import dataclass

from tandem.common.perf_model.predict import beside_decode, expect, is_faster_here, queue_seconds
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import computing_s, slot_wait_s, with_likely_rates

OWN_TIMES = 2.0  # a prompt may wait as long as it takes itself, whatever the limit is
MARGIN = 0.75  # of the limit: predictions are believed up to it, until their spread is known


@dataclass(frozen=True, slots=True)
class TtftLimit:
    """Longest time to first token that is still of use, by the length of the prompt."""

    base_s: float
    token_s: float = 0.0  # more for each token of the prompt
    # At least so many times what the prompt takes where nobody is ahead of it: else a long one
    # would be refused for ever. 0: a strict limit, as a service level is.
    own_times: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


def expected_ttft_s(work: Work, placement: Placement, *, completion_tokens: float = 0.0) -> float:
    """Predicts the TTFT of a placed request from its workers' reports. `completion_tokens` is the
    mean number of tokens that a request makes here; 0 if unknown, and running slots are then
    assumed to come free."""
    return _expect(work, placement, slot_wait_s(work, placement.decode, completion_tokens))[0]


def computing_worker(work: Work, placement: Placement) -> WorkerSnapshot:
    """Returns the worker that is expected to prefill the prompt: the first candidate, or the decode
    worker, which decides it."""
    _, is_here = _expect(work, placement, 0.0)
    return placement.decode if is_here else placement.computes


def _expect(work: Work, placement: Placement, after_s: float) -> tuple[float, bool]:
    """Returns the seconds until the prompt is computed, and whether the decode worker does it."""
    missing = placement.tokens_missing
    way = placement.decode.prefill_at
    if not placement.prefill_candidates:
        decode = with_likely_rates([placement.decode])[0]
        return _prefilled_s(work, decode, missing, after_s=after_s), True
    decode, *peers = with_likely_rates([placement.decode, *placement.prefill_candidates])
    there_s = min(_prefilled_s(work, w, missing, after_s=after_s) for w in peers)
    if way == "remote":
        return there_s, False
    here_s = _prefilled_s(work, decode, missing, after_s=after_s)
    delay_s = computing_s(work, decode, missing) * decode.num_running
    if way == "local" or is_faster_here(here_s + delay_s, there_s):
        return here_s, True
    return there_s, False


def keep_deadlines(placement: Placement) -> bool:
    """Returns whether all its workers refuse by themselves what would come too late."""
    return all(w.keeps_deadlines for w in (placement.decode, *placement.prefill_candidates))


def allowed_s(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    *,
    slower: float = 1.0,
    margin: float = MARGIN,
) -> float:
    """Largest acceptable prediction, in seconds; workers are `slower` times as slow as they report,
    and `margin` is the usable share of the limit. Infinity if no worker has measured rates."""
    workers = with_likely_rates([*placement.prefill_candidates, placement.decode])
    if not any(w.rates.measured for w in workers):
        return math.inf
    allowed = margin * limit.seconds(work.num_tokens)
    if limit.own_times:
        own_s = min(computing_s(work, w, placement.tokens_missing) for w in workers)
        allowed = max(allowed, limit.own_times * slower * own_s)
    return allowed


def _prefilled_s(work: Work, worker: WorkerSnapshot, missing: int, *, after_s: float) -> float:
    """Predicts the seconds until that worker has computed the prompt, begun after `after_s`."""
    rates = beside_decode(worker.rates, worker.chunk_tokens, worker.num_running)
    queue_s = worker.queued_s
    cached = work.num_tokens - missing
    if queue_s is None:  # those that it reports are beside decode already
        queue_s = queue_seconds(rates, worker.queued_tokens)
    return expect(rates, work.num_tokens, cached, queue_s=queue_s, after_s=after_s).total_s
