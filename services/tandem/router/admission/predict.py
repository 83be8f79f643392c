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

from tandem.perf_model.kv_load import lacking_blocks
from tandem.perf_model.predict import beside_decode, expect, is_faster_here
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import computing_s, with_likely_rates

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
    slot_s = slot_wait_s(work, placement.decode, completion_tokens)
    missing = placement.tokens_missing
    decode, *peers = with_likely_rates([placement.decode, *placement.prefill_candidates])
    here_s = _prefilled_s(work, decode, missing, after_s=slot_s)
    if not peers:
        return here_s
    there_s = min(_prefilled_s(work, w, missing, after_s=slot_s) for w in peers)
    delay_s = computing_s(work, decode, missing) * decode.num_running
    return here_s if is_faster_here(here_s + delay_s, there_s) else there_s


def slot_wait_s(work: Work, decode: WorkerSnapshot, completion_tokens: float) -> float:
    """Predicts the seconds until enough sequences have ended there. In a full worker, one ends
    every `completion_tokens` steps for each running slot."""
    num_there = decode.num_running + decode.num_pulls + decode.num_waiting
    num_to_end = num_there + 1 - decode.num_running_slots if decode.num_running_slots else 0
    # What waits there has no blocks yet; all its tokens are queued. Without it, what is queued is
    # of prompts that have all of theirs.
    queued = decode.queued_tokens if decode.num_waiting else 0
    num_blocks = (queued + work.num_kept(work.num_tokens)) / work.block_size
    if lacking_blocks(decode, num_blocks, decode.num_waiting + 1) > 0:
        num_to_end = max(num_to_end, decode.num_waiting + 1)
    if num_to_end <= 0:
        return 0.0
    num_slots_taken = decode.num_running + decode.num_pulls
    num_ending = max(1, min(num_slots_taken, decode.num_running_slots or num_slots_taken))
    return num_to_end * completion_tokens * decode.rates.decode.seconds(num_ending) / num_ending


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
    cached, queued = work.num_tokens - missing, worker.queued_tokens
    return expect(rates, work.num_tokens, cached, queued_tokens=queued, after_s=after_s).total_s
