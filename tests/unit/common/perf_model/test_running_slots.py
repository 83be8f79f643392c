"""The number of sequences that decode at once."""

from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import DecodeRate
from tandem.common.perf_model.running_slots import num_running_slots


def running_slots(itl_limit_s: float, rate: DecodeRate | None = DecodeRate(1e-2, 2e-3)) -> int:
    return num_running_slots(rate, max_num_seqs=64, itl_limit_s=itl_limit_s)


def test_without_a_limit_or_a_measurement_all_have_one() -> None:
    assert running_slots(0.0) == 64
    assert running_slots(1e-3, None) == 64


@pytest.mark.parametrize(
    ("itl_limit_s", "expected"), [(1.0, 64), (0.1, 27), (0.03, 4), (0.01, 1), (1e-9, 1)]
)
def test_running_slots_are_what_a_decode_step_has_time_for(
    itl_limit_s: float, expected: int
) -> None:
    assert running_slots(itl_limit_s) == expected


def test_a_rate_without_a_share_of_each_sequence_gives_running_slots_to_all_or_one() -> None:
    assert running_slots(0.1, DecodeRate(1e-2, 0.0)) == 64
    assert running_slots(0.1, DecodeRate(1.0, 0.0)) == 1
