"""OpenAI's `best_of`: returns the completions with the highest mean log probability per token.

No completion is sent before all of them have ended.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from tandem.router.request.delta import Delta


async def best_of(
    deltas: AsyncGenerator[Delta, None], num_best: int, *, shows_logprobs: bool
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of the best choices, one choice after another. The best gets index 0.

    The usage `total` also counts the discarded choices. Of choices with equal means, the one that
    had the lower index is better.
    """
    made: dict[int, list[Delta]] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            made.setdefault(delta.index, []).append(delta)
            if delta.total is not None:
                total = delta.total
    ranked = sorted(sorted(made), key=lambda index: _mean_logprob(made[index]), reverse=True)
    best = ranked[:num_best]
    for place, index in enumerate(best):
        *others, last = made[index]
        is_last = place == len(best) - 1
        for delta in (*others, replace(last, total=total if is_last else None)):
            yield replace(
                delta,
                index=place,
                logprobs=delta.logprobs if shows_logprobs else [],
            )


def _mean_logprob(deltas: Sequence[Delta]) -> float:
    logprobs = [one.logprob for delta in deltas for one in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
