from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.common.perf_model.meters import LinearMeter, PairMeter
from tandem.common.perf_model.rates import DEFAULT_PREFILL, PairRate, PrefillRate, token_contexts

# From a GPU to a core that is shared with others.
scales = st.floats(0.001, 30.0)
seeds = st.integers(0, 10_000)
noises = st.sampled_from([0.0, 0.02, 0.05])
outliers = st.sampled_from([0.0, 0.05])


def a_rate(scale: float) -> PrefillRate:
    return PrefillRate(4e-3 * scale, 1e-3 * scale, 2e-7 * scale)


def prefill_meter() -> LinearMeter:
    return LinearMeter(msgspec.structs.astuple(DEFAULT_PREFILL))


def rate_of(meter: LinearMeter) -> PrefillRate:
    return PrefillRate(*meter.coefficients)


def feed(
    meter: LinearMeter, true: PrefillRate, rng: Random, count: int, noise: float, outlier: float
) -> None:
    for _ in range(count):
        num_tokens = rng.choice([16, 64, 200, 512, 512])
        context = rng.randint(0, 4000)
        took = true.seconds(num_tokens, context) * max(0.5, rng.gauss(1, noise))
        if rng.random() < outlier:
            took *= rng.uniform(2, 10)
        meter.observe((1.0, num_tokens, token_contexts(num_tokens, context)), took)


def worst_error(meter: LinearMeter, true: PrefillRate) -> float:
    learned = rate_of(meter)
    grid = [(n, c) for n in (64, 512, 2000) for c in (0, 1000, 3000)]
    return max(abs(math.log(learned.seconds(n, c) / true.seconds(n, c))) for n, c in grid)


@given(scales, seeds, noises, outliers)
def test_prefill_is_learned_from_noisy_steps(
    scale: float, seed: int, noise: float, outlier: float
) -> None:
    meter = prefill_meter()
    feed(meter, a_rate(scale), Random(seed), 120, noise, outlier)
    assert worst_error(meter, a_rate(scale)) < 0.25


@given(scales, st.sampled_from([0.1, 0.3, 2.0, 4.0, 20.0]), seeds, noises)
def test_a_change_is_followed_within_a_hundred_steps(
    scale: float, factor: float, seed: int, noise: float
) -> None:
    meter = prefill_meter()
    rng = Random(seed)
    feed(meter, a_rate(scale), rng, 300, noise, 0.0)
    feed(meter, a_rate(scale * factor), rng, 100, noise, 0.0)
    assert worst_error(meter, a_rate(scale * factor)) < 0.25


@given(scales)
def test_the_first_step_tells_the_order_of_magnitude(scale: float) -> None:
    meter = prefill_meter()
    meter.observe((1.0, 512, token_contexts(512, 0)), a_rate(scale).seconds(512))
    assert rate_of(meter).seconds(512) == pytest.approx(a_rate(scale).seconds(512), rel=0.1)
    assert worst_error(meter, a_rate(scale)) < 1.0


def test_a_small_rest_beside_a_known_time_is_not_fitted_too_low() -> None:
    """The whole durations have errors of 15%, which is as much as the rest itself."""
    rng = Random(3)
    meter = LinearMeter((0.005, 0.005))
    for _ in range(300):
        num = rng.randint(5, 20)
        meter.observe((1.0, num), (0.08 + 0.001 * num) * rng.uniform(0.85, 1.15), known_s=0.08)
    fixed_s, token_s = meter.coefficients
    assert fixed_s + 12 * token_s == pytest.approx(0.012, rel=0.25)


def test_one_step_that_was_put_aside_changes_little() -> None:
    meter = prefill_meter()
    feed(meter, a_rate(1.0), Random(0), 100, 0.02, 0.0)
    before = rate_of(meter).seconds(512)
    meter.observe((1.0, 512, token_contexts(512, 0)), 50 * a_rate(1.0).seconds(512))
    assert rate_of(meter).seconds(512) == pytest.approx(before, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096),
            st.integers(0, 1 << 40) | st.integers(0, 1 << 2000),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e5),
        ),
        max_size=40,
    )
)
@example([(0, 0, 2.0), (0, 1, 2.2250738585e-313), (0, 1, 1.0)])
def test_whatever_comes_no_coefficient_is_negative_or_without_end(
    observations: list[tuple[int, int, float]],
) -> None:
    prefill = prefill_meter()
    pair = PairMeter("nixl")
    for num_tokens, more, took in observations:
        prefill.observe((1.0, num_tokens, more), took)
        pair.observe(more, took)
    told = list(prefill.coefficients)
    told.append(pair.rate.latency_s)
    assert all(0 <= value < math.inf for value in told)
    assert 0 < pair.rate.bytes_per_s < math.inf


@given(st.floats(1e-5, 0.1), st.floats(1e6, 2e10), seeds, noises)
def test_a_pair_learns_latency_and_bandwidth(
    latency_s: float, bytes_per_s: float, seed: int, noise: float
) -> None:
    meter = PairMeter("grpc")
    rng = Random(seed)
    true = PairRate("grpc", latency_s, bytes_per_s)
    for _ in range(60):
        num_bytes = rng.choice([360 << 10, 4 << 20, 64 << 20])
        meter.observe(num_bytes, true.seconds(num_bytes) * max(0.5, rng.gauss(1, noise)))
    assert meter.rate.transport == "grpc"
    for num_bytes in (360 << 10, 64 << 20):
        assert meter.rate.seconds(num_bytes) == pytest.approx(true.seconds(num_bytes), rel=0.25)


def test_what_cannot_be_told_apart_keeps_the_ratio_of_the_guess() -> None:
    meter = LinearMeter((1.0, 3.0))
    for _ in range(50):
        meter.observe((1.0, 1.0), 8.0)
    assert meter.coefficients == pytest.approx((2.0, 6.0), rel=0.05)


def test_a_bandwidth_that_no_pull_shows_is_the_largest_observed_one_and_not_known() -> None:
    pair = PairMeter("nixl")
    for _ in range(20):  # the large pull takes no longer than the small one
        pair.observe(1_000, 1e-4)
        pair.observe(100_000, 1e-4)
    assert pair.rate.bytes_per_s <= 1.01e9
    assert not pair.rate.is_known
    known = PairMeter("nixl")
    for num_bytes in (1_000_000, 2_000_000, 4_000_000):
        known.observe(num_bytes, 1e-4 + num_bytes / 1e9)
    assert known.rate.is_known
