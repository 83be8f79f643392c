from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.ops.simulator.workers.engine import SimulatedEngine

RATES = WorkerRates(PrefillRate(0.1, 0.001, 0.0), DecodeRate(0.01, 0.002), step_tokens=100)


def test_a_prompt_takes_what_the_cost_model_says() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES)
    engine.prefill("p", 250, 30)
    assert engine.next_at() == pytest.approx(RATES.prefill.seconds(250, 30, 100))
    engine.advance(0.275)
    assert engine.take_prefilled() is None
    assert engine.prefill_tokens_left() == 125
    engine.advance(0.55)
    assert engine.take_prefilled() == "p"
    assert engine.next_at() is None


def test_sequences_share_the_steps() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES)
    engine.decode("short", 10)
    engine.decode("long", 20)
    assert engine.next_at() == pytest.approx(10 * 0.014)
    engine.advance(10 * 0.014)
    assert engine.take_decoded() == ["short"]
    assert engine.next_at() == pytest.approx(10 * 0.014 + 10 * 0.012)


def test_a_prompt_beside_the_batch_slows_both() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES)
    engine.decode("d", 10)
    engine.prefill("p", 300, 0)
    step_s = 0.6 / 3 + 0.002
    assert engine.next_at() == pytest.approx(3 * step_s)
    engine.advance(3 * step_s)
    assert engine.take_prefilled() == "p"
    assert engine.take_decoded() == []
    assert engine.next_at() == pytest.approx(3 * step_s + 7 * 0.012)
    assert engine.prefill_busy_s == pytest.approx(3 * step_s)


def test_what_is_dropped_is_told() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES)
    engine.decode("d", 10)
    engine.prefill("p", 300, 0)
    assert sorted(engine.drop_all()) == ["d", "p"]
    assert engine.next_at() is None
    assert engine.num_decoding == 0


def test_chunks_beside_decode_keep_the_step_limit() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES, 0.151)
    engine.decode("d", 100)
    assert engine.chunk_tokens == 48  # 0.151 s less the step's 0.1 s and the sequence's 0.002 s
    engine.prefill("p", 96, 0)
    step_s = 0.1 + 0.048 + 0.002
    assert engine.next_at() == pytest.approx(2 * step_s)
    engine.advance(step_s)
    assert (engine.prefill_tokens_left(), engine.prefill_context()) == (48, 48)
    for number in range(9):
        engine.decode(f"d{number}", 50)
    # Ten sequences leave 0.031 s for tokens of the prompt.
    assert engine.chunk_tokens == 16
    assert engine.next_at() == pytest.approx(step_s + 3 * (0.1 + 0.016 + 0.02))


def test_a_prompt_always_makes_progress_beside_decode() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES, 0.01)
    engine.decode("d", 100)
    engine.prefill("p", 96, 0)
    assert engine.next_at() == pytest.approx(6 * (0.1 + 0.016 + 0.002))


def test_without_decode_the_step_limit_does_not_matter() -> None:
    engine: SimulatedEngine[str] = SimulatedEngine(RATES, 0.01)
    engine.prefill("p", 250, 30)
    assert engine.next_at() == pytest.approx(RATES.prefill.seconds(250, 30, 100))
