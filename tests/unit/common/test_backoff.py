from __future__ import annotations

import pytest

from tandem.common.backoff import Backoff, doubling, doubling_at_random


def test_waits_double_up_to_the_longest_and_start_anew() -> None:
    backoff = Backoff(doubling(0.25, 3.0))
    assert [backoff.next_s() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 0.25


def test_random_waits_are_half_of_the_full_ones_at_least() -> None:
    seen = [[Backoff(doubling_at_random(0.1, 0.4)).next_s()] for _ in range(200)]
    assert 0.05 <= min(seen)[0] < max(seen)[0] <= 0.1
    backoff = Backoff(doubling_at_random(0.1, 0.4))
    for full_s in (0.1, 0.2, 0.4, 0.4):
        assert full_s / 2 <= backoff.next_s() <= full_s


def test_no_wait_overflows() -> None:
    backoff = Backoff(doubling(50e-6, 1e-3))
    assert [backoff.next_s() for _ in range(5000)][-1] == pytest.approx(1e-3)
