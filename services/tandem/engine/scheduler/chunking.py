"""Sizes the next chunk of a prompt whose blocks a peer pulls as they become final.

    compute  |--- chunk 1 ---|--- chunk 2 ---|- 3 -|
    pull                     |-- 1 --|       |- 2 -||3|
                                                    ^ exposed: the consumer waits for it

A chunk's pull is hidden behind the chunks after it, so the last one's is exposed; but each chunk
more costs a step, which reads all weights once more. Over a fast link one chunk is best; over a
slow one the chunks before the end shrink, each as long as its pull needs the next to be. A few such
plans are predicted, and the first chunk of the one that ends soonest is taken; the next call plans
anew.

Pure. That blocks are reported a little before their step ends is left out: a margin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.perf_model.rates import PrefillRate

_SHAPED_BUDGETS = 4  # so many budgets before the end chunks begin to be shaped
_LAST_MIN = 16


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of KV to the consumer: seconds of each pull, and of each token in it.

    In layers with a window only the end of a prompt moves.
    """

    latency_s: float
    token_s: float  # of all layers
    # For each window the first token that moves, and the part of `token_s` of these layers.
    windows: tuple[tuple[int, float], ...] = ()

    def pull_s(self, num_tokens: int, context: int) -> float:
        """Returns the seconds that a chunk's pull takes."""
        seconds = self.latency_s + num_tokens * self.token_s
        for first, token_s in self.windows:
            seconds -= token_s * max(0, min(num_tokens, first - context))
        return seconds


def next_chunk(
    num_missing: int,
    *,
    context: int,
    lag_s: float,
    tokens_left: int,
    budget: int,
    rate: PrefillRate,
    link: Link,
) -> int:
    """Tokens of the next chunk, 1 to `tokens_left`, of `num_missing` that follow `context` others.

    `lag_s` is how long the pulls of earlier chunks still take. `tokens_left` is what this step has
    left of `budget`, the most that later steps have.
    """
    if num_missing > _SHAPED_BUDGETS * budget:
        return tokens_left
    plans = [_fit(plan, tokens_left, budget) for plan in _plans(num_missing, budget, rate, link)]
    return min(plans, key=lambda plan: finish_s(plan, context, lag_s, rate, link))[0]


def tail_chunk(num_missing: int, *, tokens_left: int, budget: int) -> int:
    """Without a measured link: the last chunk is a quarter of the budget."""
    return _tail_plan(num_missing, tokens_left, budget)[0]


def lag_after(num_tokens: int, context: int, lag_s: float, rate: PrefillRate, link: Link) -> float:
    """Returns how long pulls still take when this chunk is computed, its own among them."""
    computed_s = rate.seconds(num_tokens, context, num_tokens)
    return max(0.0, lag_s - computed_s) + link.pull_s(num_tokens, context)


def finish_s(
    plan: Sequence[int], context: int, lag_s: float, rate: PrefillRate, link: Link
) -> float:
    """Returns the seconds from now until the last chunk's blocks are at the consumer."""
    computed_s = 0.0
    for num_tokens in plan:
        computed_s += rate.seconds(num_tokens, context, num_tokens)
        lag_s = lag_after(num_tokens, context, lag_s, rate, link)
        context += num_tokens
    return computed_s + lag_s


def _plans(num_missing: int, budget: int, rate: PrefillRate, link: Link) -> Iterator[list[int]]:
    yield [num_missing]
    yield _tail_plan(num_missing, budget, budget)
    last = _LAST_MIN
    while last < min(budget, num_missing):
        yield _shaped(num_missing, last, budget, rate, link)
        last *= 2


def _shaped(num_missing: int, last: int, budget: int, rate: PrefillRate, link: Link) -> list[int]:
    """Plans from the end: each chunk's pull takes as long as computing the chunk after it."""
    sizes = [last]
    while (left := num_missing - sum(sizes)) > 0:
        hidden_s = max(0.0, rate.step_s + sizes[-1] * rate.token_s - link.latency_s)
        size = budget if hidden_s >= budget * link.token_s else int(hidden_s / link.token_s)
        sizes.append(min(left, max(size, sizes[-1])))
    return sizes[::-1]


def _tail_plan(num_missing: int, tokens_left: int, budget: int) -> list[int]:
    plan, tail = [], max(1, budget // 4)
    while num_missing:
        size = num_missing
        if num_missing > tail:
            size = max(num_missing - tail, -(-num_missing // 2))
        plan.append(min(size, tokens_left))
        num_missing -= plan[-1]
        tokens_left = budget
    return plan


def _fit(plan: list[int], tokens_left: int, budget: int) -> list[int]:
    """The plan with no chunk over what its step has room for."""
    fitted: list[int] = []
    for size in plan:
        while size:
            fitted.append(min(size, budget if fitted else tokens_left))
            size -= fitted[-1]
    return fitted
