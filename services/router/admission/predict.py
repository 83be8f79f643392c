"""Whether a request is taken now, or refused early with the time to wait. Pure.

A request that would come too late anyway only makes those behind it late too. What is predicted is
its time to first token where it was placed: the prompts queued there and its own, each step of them
longer by those who decode there. Rates and load are believed to be off, so a part of the limit is
kept back; and while nobody has measured anything, nobody is refused for a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.cost_model import prefill_seconds
from services.router.placement.choose import Placement, Work, WorkerSnapshot
from services.router.placement.costs import TOKEN_S

MARGIN = 0.75  # of the limit: predictions are believed up to it


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


def expected_ttft_s(work: Work, placement: Placement) -> float:
    """Of the placed request, by what its workers tell; the decode worker takes the fastest way."""
    workers = (*placement.prefill_candidates, placement.decode)
    return min(_ttft_s(work, w, placement.tokens_missing) for w in workers)


def wait_s(
    work: Work, placement: Placement, limit: TtftLimit, *, ahead_s: float = 0.0
) -> float | None:
    """None when the request is taken; else the seconds after which it may be.

    `ahead_s` is what it waits for before it is placed at all.
    """
    workers = (*placement.prefill_candidates, placement.decode)
    if not any(w.rates.measured for w in workers):
        return None
    allowed_s = MARGIN * limit.seconds(work.num_tokens)
    if limit.own_times:
        cached = work.num_tokens - placement.tokens_missing
        own_s = min(prefill_seconds(w.rates, work.num_tokens, cached) for w in workers)
        allowed_s = max(allowed_s, limit.own_times * own_s)
    late_s = ahead_s + expected_ttft_s(work, placement) - allowed_s
    return late_s if late_s > 0 else None


def _ttft_s(work: Work, worker: WorkerSnapshot, missing: int) -> float:
    rates, queued = worker.rates, worker.queued_tokens
    if not rates.measured:
        return TOKEN_S * (queued + missing)
    return (
        rates.prefill.seconds(queued, 0, rates.step_tokens)
        + prefill_seconds(rates, work.num_tokens, work.num_tokens - missing)
        + (queued + missing) / rates.step_tokens * rates.decode.sequence_s * worker.num_running
    )
