"""The definition of growth in the soak benchmark."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.soak.process_growth import Series, slope_per_hour


def series(mib_per_hour: float, *, noise: float = 0.5, start: float = 100.0) -> Series:
    """Half an hour, a sample each 5 s; in the first third it fills up, whatever comes later."""
    rng, made = Random(0), Series()
    for n in range(360):
        filled = min(0, n - 110) * 0.3
        made.add(5.0 * n, start + filled + mib_per_hour * n / 720 + rng.gauss(0, noise))
    return made


def grows(made: Series) -> bool:
    return bool(made.summary(flat_share=0.05, flat=1.0)["grows"])


def test_a_line_has_its_slope_and_no_error() -> None:
    slope, error = slope_per_hour([0.0, 10.0, 20.0, 30.0], [5.0, 6.0, 7.0, 8.0])
    assert slope == pytest.approx(360.0)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_samples_that_are_alike_count_for_less() -> None:
    rng = Random(1)
    at_s = [5.0 * n for n in range(200)]
    apart = [rng.gauss(0, 1) for _ in at_s]
    walk, level = [], 0.0
    for step in apart:
        level = 0.9 * level + step
        walk.append(level)
    scale = 1 / (sum(v * v for v in walk) / sum(v * v for v in apart)) ** 0.5
    _, error_apart = slope_per_hour(at_s, apart)
    _, error_walk = slope_per_hour(at_s, [scale * v for v in walk])
    assert error_walk > 2 * error_apart


def test_what_only_fills_up_at_first_is_flat() -> None:
    made = series(0.0)
    assert made.values[-1] - made.values[0] > 30
    assert not grows(made)


def test_a_leak_is_found_and_a_few_mib_of_noise_are_none() -> None:
    assert grows(series(20.0))
    assert not grows(series(3.0))
    assert not grows(series(20.0, noise=100.0))
    assert not grows(Series([0.0, 5.0], [1.0, 100.0]))
