"""Whether a request is taken now, or refused early with the time to wait. Pure.

A request that would come too late anyway only makes those behind it late too. What is predicted is
its time to first token where it was placed:

    until the decode worker has a seat for it, and blocks: so many others must end first
    meanwhile, and after that: the prompts queued where it is prefilled
    its own prompt; steps are longer by those who decode there

The decode worker decides where it is prefilled (`worker/decode/prefill_choice.py`): by itself only
if that is clearly faster, the delay of all who decode there counted in. Rates and load are believed
to be off, so a part of the limit is kept back; and while nobody has measured anything, nobody is
refused for a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.cost_model import HERE_MARGIN
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import TOKEN_S, computing_s, with_likely_rates

MARGIN = 0.75  # of the limit: predictions are believed up to it, until their spread is known


@dataclass(frozen=True, slots=True)
class TtftLimit:
    """The longest wait for a first token that is still of use."""

    base_s: float
    token_s: float = 0.0  # more for each token of the prompt
    # At least so many times what the prompt takes where nobody is ahead of it: else a long one
    # would be refused for ever. 0: a strict limit, as a service level is.
    own_times: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


def expected_ttft_s(work: Work, placement: Placement, *, completion_tokens: float = 0.0) -> float:
    """Of the placed request, by what its workers tell. `completion_tokens` is how many tokens a
    request makes here, in the mean; 0: nobody knows, and seats are believed to come free."""
    seat_s = seat_wait_s(work, placement.decode, completion_tokens)
    missing = placement.tokens_missing
    decode, *peers = with_likely_rates([placement.decode, *placement.prefill_candidates])
    here_s = _prefilled_s(work, decode, missing, after_s=seat_s)
    if not peers:
        return here_s
    there_s = min(_prefilled_s(work, w, missing, after_s=seat_s) for w in peers)
    delay_s = computing_s(work, decode, missing) * decode.num_running
    return here_s if here_s + delay_s < HERE_MARGIN * there_s else there_s


def seat_wait_s(work: Work, decode: WorkerSnapshot, completion_tokens: float) -> float:
    """Until enough sequences have ended there. In a full worker, one does each
    `completion_tokens` steps for each seat."""
    num_there = decode.num_running + decode.num_pulls + decode.num_waiting
    num_to_end = num_there + 1 - decode.num_seats if decode.num_seats else 0
    if decode.blocks_total:
        # What waits there has no blocks yet; all its tokens are queued. Without it, what is queued
        # is of prompts that have all of theirs.
        free_tokens = (decode.blocks_total - decode.blocks_used) * work.block_size
        queued = decode.queued_tokens if decode.num_waiting else 0
        if queued + work.num_tokens > free_tokens:
            num_to_end = max(num_to_end, decode.num_waiting + 1)
    if num_to_end <= 0:
        return 0.0
    num_seated = decode.num_running + decode.num_pulls
    num_ending = max(1, min(num_seated, decode.num_seats or num_seated))
    return num_to_end * completion_tokens * decode.rates.decode.seconds(num_ending) / num_ending


def allowed_s(
    work: Work,
    placement: Placement,
    limit: TtftLimit,
    *,
    slower: float = 1.0,
    margin: float = MARGIN,
) -> float:
    """What a prediction may be; workers are so many times slower than they tell, and `margin` of
    the limit is not kept back. Without rates there is none to speak of: infinity."""
    workers = with_likely_rates([*placement.prefill_candidates, placement.decode])
    if not any(w.rates.measured for w in workers):
        return math.inf
    allowed = margin * limit.seconds(work.num_tokens)
    if limit.own_times:
        own_s = min(computing_s(work, w, placement.tokens_missing) for w in workers)
        allowed = max(allowed, limit.own_times * slower * own_s)
    return allowed


def wait_s(work: Work, placement: Placement, limit: TtftLimit) -> float | None:
    """None when the request is taken; else the seconds after which it may be."""
    late_s = expected_ttft_s(work, placement) - allowed_s(work, placement, limit)
    return late_s if late_s > 0 else None


def _prefilled_s(work: Work, worker: WorkerSnapshot, missing: int, *, after_s: float) -> float:
    """Until the prompt is computed there, begun after so many seconds."""
    rates, queued = worker.rates, worker.queued_tokens
    if not rates.measured:
        return max(after_s, TOKEN_S * queued) + TOKEN_S * missing
    chunk = min(rates.step_tokens, worker.chunk_tokens or rates.step_tokens)
    beside_s = rates.decode.sequence_s * worker.num_running / chunk  # of each token
    cached = min(work.num_tokens - missing, work.num_tokens - 1)
    queue_s = rates.prefill.seconds(queued, 0, chunk) + queued * beside_s
    own_s = rates.prefill.seconds(work.num_tokens - cached, cached, chunk) + missing * beside_s
    return max(after_s, queue_s) + own_s
