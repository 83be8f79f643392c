"""Sizes may not flip: whatever is wanted, at most one change of direction in `reversal_s`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.router.autoscaler.hysteresis import Stabilizer

CONFIG = AutoscaleConfig()
WISHES = st.lists(st.integers(1, 8), min_size=2, max_size=400)


def follow(wishes: list[int], config: AutoscaleConfig = CONFIG, size: int = 2) -> list[int]:
    stabilizer = Stabilizer(config, 0.0)
    sizes = [size]
    for turn, wanted in enumerate(wishes):
        sizes.append(stabilizer.step(turn * config.interval_s, sizes[-1], wanted, wanted).size)
    return sizes


def turns(sizes: list[int], interval_s: float) -> list[float]:
    found = []
    direction = 0
    for number, (before, after) in enumerate(pairwise(sizes)):
        now = (after > before) - (after < before)
        if now and direction and now != direction:
            found.append(number * interval_s)
        direction = now or direction
    return found


@settings(max_examples=150, deadline=None)
@given(WISHES)
def test_never_two_changes_of_direction_within_ten_minutes(wishes: list[int]) -> None:
    times = turns(follow(wishes), CONFIG.interval_s)

    assert all(later - earlier >= CONFIG.reversal_s for earlier, later in pairwise(times))


@settings(max_examples=100, deadline=None)
@given(WISHES)
def test_a_size_stays_within_what_was_wanted_and_what_was(wishes: list[int]) -> None:
    sizes = follow(wishes)

    assert all(min(2, *wishes) <= size <= max(2, *wishes) for size in sizes)


@settings(max_examples=100, deadline=None)
@given(WISHES)
def test_it_never_shrinks_below_what_was_wanted_in_the_window(wishes: list[int]) -> None:
    window = int(CONFIG.down_window_s / CONFIG.interval_s)
    sizes = follow(wishes)

    for number, (before, after) in enumerate(pairwise(sizes)):
        if after < before:
            assert after >= max(wishes[max(0, number - window) : number + 1])


def test_up_is_at_once_and_all_the_way() -> None:
    assert follow([7]) == [2, 7]


def test_down_waits_for_the_window_then_goes_in_steps() -> None:
    sizes = follow([8] + [1] * 200)

    first = next(n for n, size in enumerate(sizes) if n > 1 and size < 8)
    assert (first - 1) * CONFIG.interval_s > CONFIG.down_window_s
    changes = [after - before for before, after in pairwise(sizes[first - 1 :]) if after != before]
    assert changes == [-2, -1, -1, -1, -1, -1]
    assert sizes[-1] == 1


def test_after_a_start_nothing_shrinks_before_the_window_is_over() -> None:
    sizes = follow([1] * 61)

    assert set(sizes[:61]) == {2}


def test_what_holds_it_back_is_said() -> None:
    stabilizer = Stabilizer(CONFIG, 0.0)
    stabilizer.step(0, 2, 4, 4)

    assert stabilizer.step(10, 4, 3, 3).held == "4 workers were needed in the last 600 s"
    assert stabilizer.step(605, 4, 3, 3).held == ""  # down: the first change of direction
    assert stabilizer.step(610, 3, 5, 5).held == (
        "the pool changed its direction 5 s ago, and may change it again in 595 s"
    )


def test_an_empty_pool_is_woken_though_it_just_turned() -> None:
    stabilizer = Stabilizer(CONFIG, 0.0)
    stabilizer.step(0, 1, 2, 2)
    assert stabilizer.step(605, 2, 0, 0).size == 1
    assert stabilizer.step(670, 1, 0, 0).size == 0

    assert stabilizer.step(680, 0, 1, 1).size == 1


def test_a_load_about_the_edge_of_two_sizes_keeps_the_larger_one() -> None:
    stabilizer = Stabilizer(CONFIG, 0.0)
    size = 2
    for turn in range(400):
        size = stabilizer.step(turn * 10.0, size, 1, 2).size
    assert size == 2
    for turn in range(400, 500):
        size = stabilizer.step(turn * 10.0, size, 1, 1).size
    assert size == 1
