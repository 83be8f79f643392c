"""Chunks for a peer: all of the prompt, within their steps, and never later than simpler plans."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.rates import PrefillRate
from tandem.engine.scheduler.chunking import Link, finish_s, lag_after, next_chunk, tail_chunk

BUDGET = 512
RATES = st.builds(
    PrefillRate,
    step_s=st.floats(1e-4, 5e-2),
    token_s=st.floats(1e-5, 3e-3),
    token_context_s=st.floats(0, 1e-6),
)
LINKS = st.builds(Link, latency_s=st.floats(0, 0.05), token_s=st.floats(0, 3e-3))
CPU = PrefillRate(step_s=0.012, token_s=6e-4, token_context_s=1e-7)


def executed(num_tokens: int, choose: Callable[[int, int], int]) -> list[int]:
    """Sizes of all chunks, each chosen when the one before it is computed."""
    sizes: list[int] = []
    while (left := num_tokens - sum(sizes)) > 0:
        sizes.append(choose(left, sum(sizes)))
        assert 1 <= sizes[-1] <= min(left, BUDGET)
    return sizes


def planned(num_tokens: int, rate: PrefillRate, link: Link) -> list[int]:
    lag_s = 0.0

    def choose(left: int, done: int) -> int:
        nonlocal lag_s
        size = next_chunk(
            left, context=done, lag_s=lag_s, tokens_left=BUDGET, budget=BUDGET, rate=rate, link=link
        )
        lag_s = lag_after(size, done, lag_s, rate, link)
        return size

    return executed(num_tokens, choose)


@given(st.integers(1, 5000), RATES, LINKS)
def test_chunks_are_the_whole_prompt_and_fit_their_steps(
    num_tokens: int, rate: PrefillRate, link: Link
) -> None:
    assert sum(planned(num_tokens, rate, link)) == num_tokens


@given(st.integers(1, 4 * BUDGET), RATES, LINKS)
def test_the_plan_ends_no_later_than_one_chunk_or_a_fixed_tail(
    num_tokens: int, rate: PrefillRate, link: Link
) -> None:
    fixed = executed(
        num_tokens, lambda left, _: tail_chunk(left, tokens_left=BUDGET, budget=BUDGET)
    )
    whole = executed(num_tokens, lambda left, _: min(left, BUDGET))
    best = min(finish_s(plan, 0, 0.0, rate, link) for plan in (fixed, whole))
    assert finish_s(planned(num_tokens, rate, link), 0, 0.0, rate, link) <= best * (1 + 1e-9)


def test_over_a_fast_link_a_prompt_of_one_step_is_one_chunk() -> None:
    shared_memory = Link(latency_s=2e-4, token_s=6e-6)
    assert planned(512, CPU, shared_memory) == [512]
    assert planned(1024, CPU, shared_memory) == [512, 512]


def test_over_a_slow_link_chunks_shrink_towards_the_end() -> None:
    gigabit = Link(latency_s=2e-3, token_s=4e-4)
    sizes = planned(2048, CPU, gigabit)
    assert sizes[-1] < 128
    assert sizes[1:] == sorted(sizes[1:], reverse=True)  # the first takes what is left over


def test_a_step_with_little_room_gets_a_chunk_that_fits() -> None:
    link = Link(1e-3, 1e-4)
    for num_missing in (30, 300, 30_000):
        size = next_chunk(
            num_missing, context=0, lag_s=0.0, tokens_left=40, budget=BUDGET, rate=CPU, link=link
        )
        assert 1 <= size <= 40
    assert tail_chunk(300, tokens_left=40, budget=BUDGET) == 40
