"""A step of the load is seen at once, and chance is none."""

from __future__ import annotations

from random import Random

import pytest

from tandem.router.autoscaler.load_step import step_start

STEADY = [(10.0, 4)] * 30


@pytest.mark.parametrize(
    ("since", "found"),
    [
        ([(10.0, 18)], 30),
        ([(10.0, 17)], None),
        ([(10.0, 13), (10.0, 13)], 30),  # two samples show what one does not
        ([(2.0, 8), (2.0, 8)], 30),
        ([(10.0, 8)] * 6, None),  # twice as many: a rise
    ],
)
def test_a_step_begins_with_the_first_sample_that_has_too_many(
    since: list[tuple[float, int]], found: int | None
) -> None:
    assert step_start([*STEADY, *since]) == found


def test_a_step_needs_a_time_before_it() -> None:
    assert step_start([(10.0, 90)]) is None
    assert step_start([(2.0, 0), (10.0, 90)]) is None
    assert step_start([(10.0, 0), (10.0, 90)]) == 1


def test_chance_makes_no_step_in_hours_of_each_load() -> None:
    rng = Random(0)
    for rate in (0.2, 1.0, 4.0):
        counts = [0] * 1440
        next_s = rng.expovariate(rate)
        while next_s < 14_400:
            counts[int(next_s // 10)] += 1
            next_s += rng.expovariate(rate)
        samples = [(10.0, count) for count in counts]
        found = [step_start(samples[max(0, n - 60) : n]) for n in range(12, 1441)]
        assert sum(start is not None for start in found) == 0
