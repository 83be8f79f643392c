"""How many decode at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.cost_model import DecodeRate
from tandem.engine.scheduler.seats import Seats


def seats(itl_limit_s: float, rate: DecodeRate | None = DecodeRate(1e-2, 2e-3)) -> int:
    pace = SimpleNamespace(decode_rate=rate)
    return Seats(pace, max_num_seqs=64, itl_limit_s=itl_limit_s).num  # type: ignore[arg-type]


def test_without_a_limit_or_a_measurement_all_have_one() -> None:
    assert seats(0.0) == 64
    assert seats(1e-3, None) == 64


@pytest.mark.parametrize(
    ("itl_limit_s", "num_seats"), [(1.0, 64), (0.1, 20), (0.03, 2), (0.01, 1), (1e-9, 1)]
)
def test_seats_are_what_a_decode_step_has_time_for(itl_limit_s: float, num_seats: int) -> None:
    assert seats(itl_limit_s) == num_seats


def test_a_rate_without_a_share_of_each_sequence_seats_all_or_one() -> None:
    assert seats(0.1, DecodeRate(1e-2, 0.0)) == 64
    assert seats(0.1, DecodeRate(1.0, 0.0)) == 1
