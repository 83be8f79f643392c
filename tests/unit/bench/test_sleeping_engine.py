"""The step times of sleeping engines: those that the simulator takes for the same card."""

from __future__ import annotations

import pytest

from benchmarks.autoscaler.sleeping_engine import GPUS

L4 = GPUS["L4"]


def test_a_step_takes_what_the_rates_of_the_card_say() -> None:
    assert L4.step_s([(1, 1250)] * 20) == pytest.approx(L4.decode(1250).seconds(20))
    chunks = [(512, 512), (512, 1024), (176, 1200)]
    assert sum(L4.step_s([chunk]) for chunk in chunks) == pytest.approx(L4.prefill.seconds(1200))


def test_a_chunk_beside_decode_adds_its_products_alone() -> None:
    alone, chunk = L4.step_s([(1, 1250)] * 20), L4.step_s([(512, 512)])

    assert L4.step_s([*[(1, 1250)] * 20, (512, 512)]) == pytest.approx(
        alone + chunk - L4.prefill.step_s
    )
