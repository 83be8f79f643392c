"""Decides for which sequences a draft model computes in a step. Pure: takes predicted times, and
returns a plan.

All gains and costs are in seconds of the engine. A step of b sequences that takes s seconds yields
b tokens, so a further token of the step is worth s / b seconds. A sequence gains from the draft
model if

    the value of the accepted tokens > the time of the draft model's steps + that of verification.

The draft model must first compute the tokens of the sequence that it lacks: its prompt, if a
prefill worker computed that, and the tokens of steps without proposals. It does so if the gain
until the expected end of the answer is larger than this cost.

Otherwise a part of the time of all steps is left for trials, in which the draft model proposes
tokens that are only compared with those that are sampled. So a draft model that begins to gain is
used again, and one that never does costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.common.perf_model.step_time import DraftPrice

# A sequence that lacks at most so many tokens gets proposals in the same step.
READY_TOKENS = 16
# Number of proposed tokens of a trial.
_TRIAL_TOKENS = 8


class Candidate(NamedTuple):
    """A decoding sequence for which the draft model may compute."""

    probability: float  # that a proposed token is accepted, if all before it are
    num_missing: int  # number of known tokens that the draft model has not computed
    num_left: float  # expected number of tokens until the end of the answer
    tokens_max: int  # largest number of proposed tokens


class DraftRates(NamedTuple):
    """Predicted times of the draft model, in seconds."""

    step_s: float  # a step, without its tokens
    token_s: float  # each token of a step
    chunk_token_s: float  # each token of a chunk of a prompt


class DraftPlan(NamedTuple):
    """What the draft model computes in a step."""

    drafted: Sequence[int] = ()  # indices of the candidates that get proposals
    depth: int = 0  # number of proposed tokens of each
    caught_up: int | None = None  # index of the candidate of which missing tokens are computed
    chunk_tokens: int = 0  # largest number of these tokens
    is_trial: bool = False  # True: the plan takes its time from that of trials


def plan_drafts(
    candidates: Sequence[Candidate],
    *,
    num_sequences: int,
    price: DraftPrice,
    rates: DraftRates,
    sequences_max: int,
    tokens_max: int,
    chunk_max: int,
    trial_s: float,
) -> DraftPlan:
    """Plans a step that decodes `num_sequences` sequences.

    At most `sequences_max` sequences get proposals, with `tokens_max` tokens in all. `chunk_max` is
    the largest number of tokens of a chunk, and `trial_s` the seconds that trials may take.
    """
    costs = _Costs(num_sequences, price, rates)
    able = [at for at, each in enumerate(candidates) if each.tokens_max > 0]
    ready = [at for at in able if candidates[at].num_missing <= READY_TOKENS]
    behind = [at for at in able if candidates[at].num_missing > READY_TOKENS]
    ready.sort(key=lambda at: -candidates[at].probability)
    count, depth = costs.best([candidates[at] for at in ready[:sequences_max]], tokens_max)
    gains = {at: costs.gain_until_end(candidates[at]) for at in behind}
    paying = [at for at in behind if gains[at] > 0]
    if count or paying:
        caught_up = max(paying, key=gains.__getitem__, default=None)
        drafted = [candidates[at] for at in ready[:count]]
        chunk = costs.chunk(chunk_max, costs.added_s(drafted, depth))
        return DraftPlan(ready[:count], depth, caught_up, chunk)
    if not able:
        return DraftPlan()
    cheapest = min(able, key=lambda at: candidates[at].num_missing)
    one = candidates[cheapest]
    depth = min(_TRIAL_TOKENS, one.tokens_max)
    if costs.catch_up_s(one) + costs.steps_s(1, depth) > trial_s:
        return DraftPlan()
    if one.num_missing > READY_TOKENS:
        return DraftPlan(caught_up=cheapest, chunk_tokens=costs.chunk(chunk_max), is_trial=True)
    return DraftPlan([cheapest], depth, is_trial=True)


class _Costs(NamedTuple):
    num_sequences: int
    price: DraftPrice
    rates: DraftRates

    def steps_s(self, count: int, depth: int) -> float:
        """Returns the time of the draft model's steps for `count` sequences."""
        return depth * (self.rates.step_s + count * self.rates.token_s)

    def catch_up_s(self, one: Candidate) -> float:
        return one.num_missing * self.rates.chunk_token_s

    def added_s(self, drafted: Sequence[Candidate], depth: int) -> float:
        """Returns the time that proposals of so many tokens for these sequences add to a step."""
        num_rows = sum(min(depth, each.tokens_max) for each in drafted)
        if not num_rows:
            return 0.0
        verify_s = self.price.fixed_s + num_rows * self.price.token_s
        return verify_s + self.steps_s(len(drafted), depth)

    def chunk(self, chunk_max: int, added_s: float = 0.0) -> int:
        """Returns the number of tokens of a chunk that makes a step at most twice as long, and
        that keeps the step within its target time. Proposals add `added_s` to the step."""
        seconds = min(self.price.step_s, self.price.most_s - added_s)
        return max(READY_TOKENS, min(chunk_max, int(seconds / self.rates.chunk_token_s)))

    def best(self, ready: Sequence[Candidate], tokens_max: int) -> tuple[int, int]:
        """Returns (number of the first sequences that get proposals, number of tokens of each)
        with the most tokens per second; (0, 0) if this is a step without proposals."""
        price = self.price
        best, best_speed = (0, 0), self.num_sequences / price.step_s
        deepest = max((each.tokens_max for each in ready), default=0)
        expected = [0.0] * len(ready)  # of the proposed tokens of each sequence, so many count
        for depth in range(1, deepest + 1):
            total = 0.0
            num_rows = 0
            for count, one in enumerate(ready, 1):
                if depth <= one.tokens_max:
                    expected[count - 1] += one.probability**depth
                total += expected[count - 1]
                num_rows += min(depth, one.tokens_max)
                if num_rows > tokens_max:
                    break
                added_s = price.fixed_s + num_rows * price.token_s + self.steps_s(count, depth)
                if added_s > price.most_s:
                    break
                speed = (self.num_sequences + total) / (price.step_s + added_s)
                if speed > best_speed:
                    best, best_speed = (count, depth), speed
        return best

    def gain_until_end(self, one: Candidate) -> float:
        """Returns the seconds that a sequence gains until its end, less those of its missing
        tokens. Other sequences are assumed to get no proposals."""
        price = self.price
        best = 0.0
        accepted = 0.0
        for depth in range(1, one.tokens_max + 1):
            accepted += one.probability**depth
            added_s = price.fixed_s + depth * price.token_s + self.steps_s(1, depth)
            if added_s > price.most_s:
                break
            gain_s = accepted * price.step_s / self.num_sequences - added_s
            best = max(best, gain_s * one.num_left / (1 + accepted))
        return best - self.catch_up_s(one)
