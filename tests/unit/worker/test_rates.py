from __future__ import annotations

import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.rates import DEFAULT_PREFILL, PrefillRate, WorkerRates, default_pair
from tandem.engine.types import StepReport
from tandem.worker.peers.rates import HANG_FLOOR_S, Rates, hang_timeout_s

# A full step takes 50 ms.
MEASURED = WorkerRates(PrefillRate(0.0, 0.05 / 256, 0.0), step_tokens=256, measured=True)


def make_rates(**transfer: float) -> Rates:
    config = WorkerConfig(
        role="decode",
        cluster=ClusterConfig("c", "redis://", "t"),
        engine=EngineConfig(model="m"),
        transfer=TransferConfig(**transfer),  # type: ignore[arg-type]
        worker_id="d0",
    )
    return Rates(config, WorkerRates(block_bytes=1000, step_tokens=256))


def prefill_step(num_tokens: int, ms: float, rates: WorkerRates | None = MEASURED) -> StepReport:
    return StepReport(step_ms=ms, num_prefill_tokens=num_tokens, rates=rates)


def test_the_record_says_what_the_engine_has_measured() -> None:
    rates = make_rates()
    assert (rates.worker.measured, rates.worker.prefill) == (False, DEFAULT_PREFILL)
    assert (rates.worker.step_tokens, rates.worker.block_bytes) == (256, 1000)
    rates.on_step(StepReport())  # a turn without work
    assert not rates.worker.measured
    rates.on_step(prefill_step(100, 400.0))
    assert rates.worker == MEASURED
    rates.on_step(StepReport())
    assert rates.worker == MEASURED


def test_a_pair_tells_the_transport_in_use_and_forgets_with_its_peer() -> None:
    rates = make_rates()
    rates.use("p0", "nixl")
    assert rates.pair("p0") is None
    assert rates.pairs == {"p0": default_pair("nixl")}
    rates.on_pull("p0", "nixl", 1 << 20, 0.01)
    rates.on_pull("p0", "grpc", 1 << 20, 0.1)
    assert rates.pairs["p0"].seconds(1 << 20) == pytest.approx(0.01, rel=0.05)
    rates.use("p0", "grpc")
    assert rates.pairs["p0"].transport == "grpc"
    assert rates.pairs["p0"].seconds(1 << 20) == pytest.approx(0.1, rel=0.05)
    rates.forget("p0")
    assert (rates.pairs, rates.pair("p0", "nixl")) == ({}, None)


def test_a_probe_starts_the_pair_anew() -> None:
    rates = make_rates()
    for _ in range(50):
        rates.on_pull("p0", "nixl", 1 << 20, 1.0)
    rates.on_probe("p0", "nixl", [(1 << 20, 0.01)])
    measured = rates.pair("p0", "nixl")
    assert measured is not None
    assert measured.seconds(1 << 20) == pytest.approx(0.01, rel=0.05)


def test_a_probe_is_as_slow_as_pulls_are_made() -> None:
    rates = make_rates(bytes_per_s=1e6)
    rates.on_probe("p0", "nixl", [(1, 1e-3), (1 << 20, 0.01), (1 << 20, 0.01)])
    measured = rates.pair("p0", "nixl")
    assert measured is not None
    assert measured.seconds(10 << 20) == pytest.approx(10.5, rel=0.05)


def test_failures_count_until_a_pull_ends_well() -> None:
    rates = make_rates()
    rates.on_pull_failed("p0", "nixl")
    rates.on_pull_failed("p0", "nixl")
    assert (rates.failures("p0", "nixl"), rates.failures("p0", "grpc")) == (2, 0)
    rates.on_pull("p0", "nixl", 1, 0.1)
    assert rates.failures("p0", "nixl") == 0


def test_the_deadline_is_wide_and_the_config_caps_it() -> None:
    rates = make_rates(pull_deadline_s=30.0, delay_s=2.0)
    rates.use("p0", "nixl")
    assert rates.pull_deadline_s("p0", 1 << 30) == 30.0
    rates.on_pull("p0", "nixl", 1 << 20, 0.01)
    assert rates.pull_deadline_s("p0", 1 << 20) == pytest.approx(1.0 + 2.0 + 0.2, rel=0.05)
    assert rates.pull_deadline_s("p0", 1 << 40) == 30.0


def test_a_hung_producer_is_told_from_one_with_long_turns() -> None:
    assert hang_timeout_s(0.0, 30.0) == 30.0  # it does not say
    assert hang_timeout_s(0.01, 30.0) == HANG_FLOOR_S
    assert hang_timeout_s(3.0, 30.0) == pytest.approx(12.0)
    assert hang_timeout_s(60.0, 30.0) == 30.0
    assert hang_timeout_s(0.01, 1.0) == 1.0  # a config below the floor is meant


def test_the_longest_turn_fades() -> None:
    rates = make_rates()
    rates.on_step(prefill_step(512, 4000.0))
    assert rates.turn_s_max == pytest.approx(4.0)
    for _ in range(200):
        rates.on_step(prefill_step(512, 100.0))
    assert rates.turn_s_max == pytest.approx(0.1, rel=0.2)


def test_a_whole_chunk_is_expected_after_short_turns() -> None:
    rates = make_rates()
    assert rates.turn_s_max == 0.0
    token = WorkerRates(PrefillRate(0.0, 0.01, 0.0), step_tokens=256, measured=True)
    rates.on_step(prefill_step(16, 160.0, token))
    assert rates.turn_s_max == pytest.approx(2.56)
    rates.on_step(prefill_step(16, 160.0, WorkerRates()))
    assert rates.turn_s_max == 0.0


def test_a_place_in_the_queue_comes_free_as_often_as_requests_end() -> None:
    rates = make_rates()
    assert rates.retry_after_s == 1.0
    for second in range(100):
        rates.on_end(4.0 * second)
    assert rates.retry_after_s == pytest.approx(4.0, rel=0.05)
    for tick in range(100):
        rates.on_end(400.0 + 0.001 * tick)
    assert rates.retry_after_s == 0.1
