"""Chooses the size of the next chunk of a prompt that this worker prefills for a peer. The peer
(consumer) pulls the blocks as they become final. Time runs to the right:

    compute  |--- chunk 1 ---|--- chunk 2 ---|- 3 -|
    pull                     |-- 1 --|       |- 2 -||3|
                                                    ^ exposed: the consumer waits for it

The pull of a chunk overlaps the computation of later chunks, so only the last pull is exposed. But
each additional chunk costs a step, which reads all weights again. Over a fast link, one chunk is
best. Over a slow link, chunks shrink towards the end, so that each pull takes as long as the
computation of the next chunk. `next_chunk` predicts when a few such plans would end, and returns
the first chunk of the best plan. Each call makes new plans.

The functions depend on their arguments only. Blocks are reported a little before their step ends.
The predictions ignore this, so pulls start a little earlier than predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.common.perf_model.rates import PrefillRate

# Chunks shrink only near the prompt's end. With a budget of 512 tokens for each step, this is when
# at most 4 * 512 = 2,048 tokens are not computed yet.
_SHAPED_BUDGETS = 4
_LAST_MIN = 16


@dataclass(frozen=True, slots=True)
class Link:
    """The speed at which the consumer pulls KV: a latency for each pull, and seconds per token.

    For layers with a window, only the KV of a prompt's last tokens is pulled.
    """

    latency_s: float
    token_s: float  # seconds to pull the KV of one token, for all layers together
    # One pair for each sliding window: (index of the first token whose KV is pulled for the
    # window's layers, seconds per token for these layers). `token_s` includes these seconds.
    windows: tuple[tuple[int, float], ...] = ()

    def pull_s(self, num_tokens: int, context: int) -> float:
        """Returns the seconds to pull the KV of `num_tokens` tokens that follow the first `context`
        tokens."""
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
    """Returns the number of tokens in the next chunk, from 1 to `tokens_left`.

    The first `context` tokens of the prompt are computed, and `num_missing` tokens are not. Pulls
    of earlier chunks still take `lag_s` seconds. This step has room for `tokens_left` tokens, and
    each later step for `budget` tokens.
    """
    if num_missing > _SHAPED_BUDGETS * budget:
        return tokens_left
    plans = [_fit(plan, tokens_left, budget) for plan in _plans(num_missing, budget, rate, link)]
    return min(plans, key=lambda plan: finish_s(plan, context, lag_s, rate, link))[0]


def tail_chunk(num_missing: int, *, tokens_left: int, budget: int) -> int:
    """Returns the number of tokens in the next chunk while the speed of pulls is unknown.

    The last chunk is at most a quarter of the budget, so that little KV is left to pull after it.
    """
    return _tail_plan(num_missing, tokens_left, budget)[0]


def lag_after(num_tokens: int, context: int, lag_s: float, rate: PrefillRate, link: Link) -> float:
    """Returns the lag once a chunk of `num_tokens` tokens is computed: the seconds for which the
    consumer then continues to pull.

    `lag_s` is the lag at the start of the chunk. For example, with a lag of 2 s, a chunk that takes
    3 s to compute and 1 s to pull leaves a lag of 1 s.
    """
    computed_s = rate.seconds(num_tokens, context, num_tokens)
    return max(0.0, lag_s - computed_s) + link.pull_s(num_tokens, context)


def finish_s(
    plan: Sequence[int], context: int, lag_s: float, rate: PrefillRate, link: Link
) -> float:
    """Returns the seconds from now until the consumer has pulled the last chunk of the plan."""
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
    """Returns a plan whose last chunk has `last` tokens. The plan is made from the end: each
    earlier chunk has as many tokens as can be pulled while the next chunk is computed."""
    sizes = [last]
    while (left := num_missing - sum(sizes)) > 0:
        hidden_s = max(0.0, rate.step_s + sizes[-1] * rate.token_s - link.latency_s)
        size = budget if hidden_s >= budget * link.token_s else int(hidden_s / link.token_s)
        sizes.append(min(left, max(size, sizes[-1])))
    return sizes[::-1]


def _tail_plan(num_missing: int, tokens_left: int, budget: int) -> list[int]:
    plan = []
    tail = max(1, budget // 4)
    while num_missing:
        size = num_missing
        if num_missing > tail:
            size = max(num_missing - tail, -(-num_missing // 2))
        plan.append(min(size, tokens_left))
        num_missing -= plan[-1]
        tokens_left = budget
    return plan


def _fit(plan: list[int], tokens_left: int, budget: int) -> list[int]:
    """Splits the chunks of a plan that are too large for their step. The first step has room for
    `tokens_left` tokens, and each later step for `budget` tokens."""
    fitted: list[int] = []
    for size in plan:
        while size:
            fitted.append(min(size, budget if fitted else tokens_left))
            size -= fitted[-1]
    return fitted
