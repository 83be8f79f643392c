"""The policy on simulated workers: pools follow the load, and nothing is lost when they shrink."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import DecodeRate, PrefillRate, WorkerRates
from tandem.ops.simulator.autoscaled import Autoscaled, reversals
from tandem.ops.simulator.clock import Clock
from tandem.ops.simulator.scenario import Scenario, Slo
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.fleet import Fleet
from tandem.ops.simulator.workers.worker import SimulatedWorker
from tandem.router.admission.predict import TtftLimit
from tandem.router.placement.choose import choose

SCENARIO = Scenario(
    num_prefill=6,
    num_decode=3,
    kv_tokens=200_000,
    rates=WorkerRates(PrefillRate(5e-3, 1e-3), DecodeRate(1e-2, 2e-3), measured=True),
    slo=Slo(TtftLimit(6.0, 2e-3), 0.1),
    pull_prefixes=False,
)
CONFIG = AutoscaleConfig(
    mode="on", prefill_max=6, decode_max=3, ttft_s=6.0, ttft_token_s=2e-3, down_margin=0.8
)


def arrivals(*phases: tuple[float, float]) -> list[Arrival]:
    """Returns arrivals of 2,000 tokens, two seconds of prefill each; phases are (seconds, requests
    a second)."""
    rng = Random(3)
    now_s = 0.0
    made = []
    for length_s, rate in phases:
        end_s = now_s + length_s
        while (now_s := now_s + rng.expovariate(rate)) < end_s:
            ids = tuple(4 * len(made) + n for n in range(4))
            made.append(Arrival(now_s, 2000, 100, ids))
        now_s = end_s
    return made


@pytest.fixture(scope="module")
def run() -> tuple[Simulation, Autoscaled]:
    simulation = Simulation(SCENARIO, arrivals((900, 0.2), (1200, 1.2), (2400, 0.2)), choose)
    autoscaled = Autoscaled(simulation, CONFIG)
    autoscaled.open(prefill=1, decode=1)
    simulation.run()
    return simulation, autoscaled


def test_the_prefill_pool_grows_with_the_load_and_shrinks_after_it(
    run: tuple[Simulation, Autoscaled],
) -> None:
    sizes = run[1].pools["prefill"].sizes
    most = max(size for _, size in sizes)
    assert sizes[0] == (0.0, 1)
    assert most >= 3
    assert 900 < next(at for at, size in sizes if size >= 3) < 1100
    assert sizes[-1][1] <= 2


def test_it_never_turns_twice_in_ten_minutes(run: tuple[Simulation, Autoscaled]) -> None:
    for pool in run[1].pools.values():
        turns = reversals(pool.sizes)
        assert all(later - earlier >= 600 for earlier, later in pairwise(turns))


def test_no_request_is_lost_to_a_worker_that_goes(run: tuple[Simulation, Autoscaled]) -> None:
    simulation, autoscaled = run
    assert autoscaled.decisions
    assert {r.failure for r in simulation.requests} <= {"", "refused"}
    assert all(r.ended_s for r in simulation.requests if not r.failure)
    assert sum(r.failure == "refused" for r in simulation.requests) < 0.1 * len(simulation.requests)
    for worker in simulation.workers.values():
        worker.cache.check_integrity()


def test_it_costs_less_than_the_pools_at_their_largest(
    run: tuple[Simulation, Autoscaled],
) -> None:
    hours = run[1].worker_hours()
    assert 2 * 4500 / 3600 < hours < 0.7 * 9 * 4500 / 3600


def test_a_worker_comes_a_cold_start_later_and_goes_when_it_is_empty() -> None:
    clock = Clock()
    log = []
    scenario = Scenario(block_size=16, kv_tokens=160, sequences_max=4, queue_max=4)
    workers = [
        SimulatedWorker(f"w{n}", "prefill", scenario, clock, None)  # type: ignore[arg-type]
        for n in range(3)
    ]
    fleet = Fleet(
        clock,
        workers,
        cold_start_s=90,
        on_start=lambda w: log.append((clock.now_s, "start", w.worker_id)),
        on_drain=lambda w: log.append((clock.now_s, "drain", w.worker_id)),
        on_stop=lambda w: log.append((clock.now_s, "stop", w.worker_id)),
    )
    fleet.open(1)
    assert log == [(0, "stop", "w1"), (0, "stop", "w2")]
    log.clear()
    clock.at(10, fleet.resize, 3)
    clock.at(50, fleet.resize, 2)  # one that only starts just does not come
    clock.at(150, fleet.resize, 1)
    clock.at(160, fleet.collect)
    clock.run()

    assert log == [(100, "start", "w1"), (150, "drain", "w1"), (160, "stop", "w1")]
    assert fleet.pay() == 160 + 150 + 40
    assert fleet.sizes == [(0, 1), (10, 3), (50, 2), (150, 1)]


def test_turns_are_where_growing_becomes_shrinking() -> None:
    assert reversals([(0, 1), (1, 2), (2, 3), (3, 2), (4, 1), (5, 4)]) == [3, 5]
