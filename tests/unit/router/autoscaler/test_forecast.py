from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.autoscaler.forecast import forecast

LOADS = st.lists(st.floats(0, 100), min_size=1, max_size=60)


def of(loads: list[float], *, horizon_s: float = 100.0, quantile: float = 0.9):  # type: ignore[no-untyped-def]
    samples = [(10.0 * n, load) for n, load in enumerate(loads)]
    return forecast(samples, now_s=samples[-1][0], horizon_s=horizon_s, quantile=quantile)


def test_a_steady_load_stays() -> None:
    assert of([3.0] * 20) == pytest.approx((3.0, 3.0, 3.0))


def test_a_rising_load_goes_on_rising_over_the_horizon() -> None:
    seen = of([1.0 + 0.1 * n for n in range(20)])

    assert seen.now == pytest.approx(2.9)
    assert seen.ahead == pytest.approx(3.9)


def test_a_falling_load_ends_at_nothing() -> None:
    assert of([2.0, 1.5, 1.0, 0.5], horizon_s=1000).ahead == 0.0


def test_bursts_count_by_their_quantile_not_by_their_mean() -> None:
    loads = [1.0, 1.0, 1.0, 5.0] * 10

    assert of(loads, quantile=0.5).bound == pytest.approx(of(loads).ahead, abs=0.6)
    assert of(loads, quantile=0.9).bound > 4.5


def test_two_samples_draw_no_slope() -> None:
    assert of([1.0, 9.0]).ahead == pytest.approx(5.0)


@settings(max_examples=100, deadline=None)
@given(LOADS, st.floats(0.1, 10))
def test_it_grows_with_the_load(loads: list[float], factor: float) -> None:
    once = of(loads)
    scaled = of([load * factor for load in loads])

    assert scaled.bound == pytest.approx(once.bound * factor, rel=1e-6, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(LOADS)
def test_the_bound_is_at_least_the_line_and_never_absurd(loads: list[float]) -> None:
    seen = of(loads)

    assert 0 <= seen.ahead <= seen.bound
    assert seen.ahead <= 2 * max(loads)
