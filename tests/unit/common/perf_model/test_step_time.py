"""The rates that a worker tells, from the fit of its steps."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates, token_contexts
from tandem.common.perf_model.step_time import StepTimeModel, StepWork


def told(step_time: StepTimeModel) -> WorkerRates:
    return step_time.rates(WorkerRates(step_tokens=256, block_bytes=1000))


def prefill_of(num_tokens: int, *, num_decode: int = 0) -> StepWork:
    return StepWork(num_tokens, token_contexts(num_tokens, 0), num_decode)


@pytest.mark.parametrize("num_slow", [0, 1, 2, 3])
@pytest.mark.parametrize("slower", [10, 100, 1000])
def test_once_rates_count_as_measured_they_are_not_those_of_slow_first_steps(
    num_slow: int, slower: float
) -> None:
    step_time = StepTimeModel(0.0)
    assert told(step_time) == WorkerRates(step_tokens=256, block_bytes=1000)
    step_time.observe(StepWork(decode_tokens=3), 0.02)
    for n in range(8):
        assert not told(step_time).measured
        step_time.observe(prefill_of(100), 0.4 * (slower if n < num_slow else 1))
    assert told(step_time).measured
    assert told(step_time).prefill.seconds(100) < 4 * 0.4


def test_what_decode_takes_of_a_mixed_step_is_not_counted_as_prefill() -> None:
    step_time = StepTimeModel(0.0)
    for num_decode in (1, 10, 20, 30) * 10:
        step_time.observe(StepWork(decode_tokens=num_decode), 20e-3 + 5e-3 * num_decode)
    for _ in range(20):
        step_time.observe(prefill_of(100, num_decode=30), 0.1 + 5e-3 * 30)
    assert told(step_time).measured
    assert told(step_time).prefill.seconds(100) == pytest.approx(0.1, rel=0.15)
    assert told(step_time).decode.seconds(10) == pytest.approx(0.07, rel=0.15)


def test_a_token_costs_what_it_has_cost_of_late_in_steps_of_either_kind() -> None:
    """Beside decode it takes 2 ms, and 1 ms in steps that only prefill."""
    step_time = StepTimeModel(0.0)
    sizes = (50, 100, 200)
    for num_decode in (1, 10, 20, 30) * 10:
        step_time.observe(StepWork(decode_tokens=num_decode), 20e-3 + 5e-3 * num_decode)

    def prefill(count: int, num_decode: int, token_s: float) -> float:
        for n in range(count):
            size = sizes[n % 3]
            seconds = 20e-3 + 5e-3 * num_decode + token_s * size
            step_time.observe(StepWork(size, 0, num_decode), seconds)
        return told(step_time).prefill.seconds(200)

    assert prefill(60, 0, 1e-3) == pytest.approx(0.22, rel=0.1)
    assert prefill(200, 10, 2e-3) == pytest.approx(0.42, rel=0.1)
    assert prefill(200, 0, 1e-3) == pytest.approx(0.22, rel=0.1)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096),
            st.integers(0, 1 << 40),
            st.integers(0, 512),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=40,
    )
)
def test_whatever_comes_no_rate_is_negative_or_without_end(
    observations: list[tuple[int, int, int, float]],
) -> None:
    step_time = StepTimeModel(0.1)
    for num_tokens, contexts, num_decode, took in observations:
        step_time.observe(StepWork(num_tokens, contexts, num_decode, contexts), took)
    rates = told(step_time)
    values = [rates.prefill.step_s, rates.prefill.token_s, rates.prefill.token_context_s]
    values += [rates.decode.step_s, rates.decode.sequence_s]
    assert all(0 <= value < math.inf for value in values)


@given(st.floats(1e-4, 0.1), st.floats(1e-5, 0.01), st.integers(0, 10_000))
def test_decode_learns_the_price_of_a_sequence(step_s: float, sequence_s: float, seed: int) -> None:
    step_time = StepTimeModel(0.0)
    rng = Random(seed)
    true = DecodeRate(step_s, sequence_s)
    for _ in range(100):
        count = rng.randint(1, 32)
        step_time.observe(StepWork(decode_tokens=count), true.seconds(count) * rng.gauss(1, 0.02))
    for count in (1, 8, 32):
        assert told(step_time).decode.seconds(count) == pytest.approx(true.seconds(count), rel=0.2)


def test_prefill_alone_is_told_as_fitted() -> None:
    step_time = StepTimeModel(0.0)
    true = PrefillRate(4e-3, 2e-3, 3e-7)
    for n in range(60):
        size = (64, 200, 512)[n % 3]
        context = 500 * (n % 5)
        step_time.observe(
            StepWork(size, token_contexts(size, context)), true.seconds(size, context, size)
        )
    assert told(step_time).prefill == step_time.prefill_rate
    assert told(step_time).prefill.seconds(512, 1000) == pytest.approx(
        true.seconds(512, 1000), rel=0.05
    )
