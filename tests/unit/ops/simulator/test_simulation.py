from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.ops.simulator.output.report import summarize
from tandem.ops.simulator.policies import POLICIES, make_policy
from tandem.ops.simulator.scenario import Fault, Scenario, full_load_factor
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival, read_trace, repeat, scale_load, spread_bursts

MOONCAKE = Path(__file__).parents[3] / "data" / "mooncake_small.jsonl"
EXACT = Scenario(num_decode=2, rate_error=0.0, kv_tokens=64 * 512, admission=False)
POOLS = replace(EXACT, num_prefill=2)


def many(load: float = 0.5, count: int = 200, scenario: Scenario = EXACT) -> list[Arrival]:
    arrivals = repeat(spread_bursts(read_trace(MOONCAKE), 0), count, 0)
    return scale_load(arrivals, full_load_factor(scenario, arrivals) * load)


def run(scenario: Scenario, arrivals: list[Arrival], policy: str = "tandem") -> Simulation:
    simulation = Simulation(scenario, arrivals, make_policy(policy))
    simulation.run()
    for worker in simulation.workers.values():
        worker.cache.check_integrity()
        if worker.is_up:
            load = worker.load()
            assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 0, 0)
            assert (load.num_leases, load.blocks_used) == (0, 0)
    return simulation


def test_a_request_alone_takes_what_the_cost_model_says() -> None:
    (request,) = run(EXACT, [Arrival(1.0, 1100, 5, (0, 1, 2))]).requests
    rates = EXACT.rates
    assert request.ttft_s == pytest.approx(rates.prefill.seconds(1100, 0, rates.step_tokens))
    assert request.tpot_s == pytest.approx(rates.decode.seconds(1))


def test_a_later_turn_goes_where_its_blocks_are() -> None:
    turns = [Arrival(0.0, 1100, 5, (0, 1, 2)), Arrival(5.0, 1600, 4, (0, 1, 2, 4))]
    first, second = run(EXACT, turns).requests
    assert second.decode is first.decode
    assert second.cached_tokens == 1024  # the third block of the first turn was not full
    rates = EXACT.rates
    assert second.ttft_s == pytest.approx(rates.prefill.seconds(576, 1024, rates.step_tokens))


def test_pools_pull_what_the_decode_worker_lacks() -> None:
    turns = [Arrival(0.0, 4096, 5, tuple(range(8))), Arrival(5.0, 4096, 5, tuple(range(8)))]
    first, second = run(POOLS, turns).requests
    assert first.prefill is not None
    assert first.prefill.role == "prefill"
    rates = POOLS.rates
    alone_s = rates.prefill.seconds(4096, 0, rates.step_tokens)
    assert first.ttft_s == pytest.approx(alone_s)
    assert first.ended_s - first.first_token_s > 4 * rates.decode.seconds(1)
    assert second.cached_tokens == 4095
    assert second.prefill is second.decode


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", [EXACT, POOLS], ids=["aggregated", "pools"])
def test_every_policy_serves_every_request(policy: str, scenario: Scenario) -> None:
    report = summarize(run(scenario, many(0.5), policy), policy, 0.5)
    assert report.num_served == report.num_requests == 200
    assert 0 < report.goodput <= 1
    assert report.load_requests >= 1


@pytest.mark.parametrize("pause_s", [1800.0, 40_000.0, 400_000.0])
def test_shares_stay_finite_in_a_trace_of_weeks(pause_s: float) -> None:
    """Shares double every 5 minutes, and no float counts more than 1,024 doublings, or 85 h."""
    count = int(30 * 86_400 / pause_s)
    arrivals = [Arrival(n * pause_s, 1100, 5, (2 * n, 2 * n + 1)) for n in range(count)]
    simulation = run(POOLS, arrivals)
    assert simulation.clock.now_s > 20 * 86_400
    assert all(request.ended_s for request in simulation.requests)
    roster = simulation.view.roster
    for role in ("decode", "prefill"):
        placed = [roster.by_id[worker_id].prefill_share for worker_id in roster.pool(role)]
        assert all(0.0 <= share < 1e40 for share in placed)
        assert roster.mean_prefill_share(role) == pytest.approx(sum(placed) / len(placed))


def test_the_same_seed_gives_the_same_figures() -> None:
    scenario = replace(POOLS, rate_error=0.3, seed=3)
    reports = [summarize(run(scenario, many(0.8)), "tandem", 0.8) for _ in range(2)]
    assert reports[0] == reports[1]
    rates = scenario.true_rates("decode-0")
    assert rates != scenario.rates
    assert 0.7 <= rates.decode.step_s / scenario.rates.decode.step_s <= 1.3


def test_a_full_queue_refuses_and_memory_that_is_too_small_refuses_at_once() -> None:
    scenario = replace(EXACT, queue_max=1)
    burst = [Arrival(0.0, 5000, 10, ()) for _ in range(10)]
    simulation = run(scenario, burst)
    assert [r.failure for r in simulation.requests].count("refused") == 6
    (request,) = run(EXACT, [Arrival(0.0, 70 * 512, 10, ())]).requests
    assert request.failure == "refused"


def test_admission_keeps_the_slo_of_those_it_takes() -> None:
    arrivals = many(3.0, 400)
    late, early = (
        summarize(run(replace(EXACT, admission=admission), arrivals), "tandem", 3.0)
        for admission in (False, True)
    )
    assert early.num_refused > 0
    assert early.num_good > early.num_served * 0.95
    assert late.num_refused == 0
    assert late.num_good < early.num_good


def test_a_dead_decode_worker_loses_nothing_and_its_requests_move() -> None:
    arrivals = [Arrival(0.0, 600, 2000, ()), Arrival(0.0, 600, 2000, ())]
    arrivals += [Arrival(1.0, 60_000 // 4, 5, ()) for _ in range(6)]
    faults = (Fault(1.5, "decode-0", "down"), Fault(2.0, "decode-0", "up"))
    simulation = run(replace(EXACT, faults=faults), arrivals)
    moved = [r for r in simulation.requests if r.num_migrations]
    begun = [r for r in moved if r.num_output_tokens]
    assert begun
    assert all(r.first_token_s < 1.5 and r.num_output_tokens < 2000 for r in begun)
    assert len(moved) > len(begun)
    assert all(r.ended_s for r in moved)
    assert all(r.decode is not None and r.decode.worker_id == "decode-1" for r in moved)


def test_a_dead_prefill_worker_costs_no_request() -> None:
    faults = tuple(Fault(at, "prefill-0", "down") for at in (0.5, 2.0))
    faults += (Fault(1.0, "prefill-0", "up"),)
    simulation = run(replace(POOLS, faults=faults), many(1.0, scenario=POOLS))
    assert all(r.ended_s for r in simulation.requests)


def test_no_worker_left_refuses() -> None:
    faults = tuple(Fault(1.0, f"decode-{n}", "down") for n in range(2))
    simulation = run(replace(EXACT, faults=faults), [Arrival(2.0, 100, 2, ())])
    assert simulation.requests[0].failure == "refused"


@pytest.mark.parametrize("scenario", [EXACT, POOLS], ids=["aggregated", "pools"])
def test_faults_under_load_end_every_request_once(scenario: Scenario) -> None:
    arrivals = many(1.2, 300, scenario)
    end_s = arrivals[-1].at_s
    faults = tuple(
        Fault(end_s * share, worker_id, "down" if down else "up")  # type: ignore[arg-type]
        for worker_id, start in (("decode-0", 0.1), ("decode-1", 0.5), ("prefill-1", 0.2))
        for share, down in ((start, True), (start + 0.1, False))
        if worker_id in scenario.roles
    )
    simulation = run(replace(scenario, faults=faults), arrivals)
    assert all(bool(r.ended_s) != bool(r.failure) for r in simulation.requests)


def test_workers_that_share_cores_are_slower_together() -> None:
    """Two prompts at once, on two workers: on one core each takes as long as both in a row."""
    pair = [Arrival(0.0, 1024, 1, (0, 1)), Arrival(0.0, 1024, 1, (2, 3))]
    alone_s = EXACT.rates.prefill.seconds(1024, 0, EXACT.rates.step_tokens)
    for cores, expected_s in ((0.0, alone_s), (2.0, alone_s), (1.0, 2 * alone_s)):
        requests = run(replace(EXACT, cores=cores), pair).requests
        assert {r.decode.worker_id for r in requests if r.decode} == {"decode-0", "decode-1"}
        assert [r.ttft_s for r in requests] == pytest.approx([expected_s] * 2)
    later = [pair[0], replace(pair[1], at_s=alone_s / 2)]
    first, second = run(replace(EXACT, cores=1.0), later).requests
    assert first.ttft_s == pytest.approx(1.5 * alone_s)
    assert second.ttft_s == pytest.approx(1.5 * alone_s)


ANSWERS = [Arrival(0.15 * n, 600, 800, (2 * n, 2 * n + 1)) for n in range(80)]
ONE_OF_EACH = replace(
    EXACT, num_prefill=1, num_decode=1, kv_tokens=400 * 512, block_size=512, report_age_s=0.1
)


def test_prefill_workers_decode_if_decode_workers_are_busy() -> None:
    auto = run(ONE_OF_EACH, ANSWERS)
    staying = [r for r in auto.requests if r.decode and r.decode.role == "prefill"]
    assert len(staying) > 20
    assert all(r.prefill is r.decode and r.lease is None for r in staying)
    remote = run(replace(ONE_OF_EACH, prefill_at="remote"), ANSWERS)
    assert all(r.decode and r.decode.worker_id == "decode-0" for r in remote.requests)
    assert all(r.prefill and r.prefill.worker_id == "prefill-0" for r in remote.requests)
    local = run(replace(ONE_OF_EACH, prefill_at="local"), ANSWERS)
    assert all(r.prefill is r.decode for r in local.requests)
    ends = [max(r.ended_s for r in each.requests) for each in (auto, remote, local)]
    assert ends[0] < 0.95 * min(ends[1:])
    for simulation in (auto, remote, local):
        assert all(known.num_staying == 0 for known in simulation.view._known.values())


def test_what_decodes_on_a_prefill_worker_migrates_when_it_dies() -> None:
    faults = (Fault(10.0, "prefill-0", "down"),)
    simulation = run(replace(ONE_OF_EACH, faults=faults), ANSWERS)
    assert sum(r.num_migrations for r in simulation.requests) > 10
    assert all(r.ended_s and not r.failure for r in simulation.requests)
    assert all(known.num_staying == 0 for known in simulation.view._known.values())


def test_the_itl_limit_bounds_the_sequences_that_run() -> None:
    scenario = replace(ONE_OF_EACH, prefill_at="remote", itl_limit_s=0.02)
    simulation = Simulation(scenario, ANSWERS, make_policy("tandem"))
    worker = simulation.workers["decode-0"]
    # 13 ms of the limit are for a decode step: 8 ms and 0.15 ms for each sequence.
    assert worker.load().num_running_slots == 33
    most: list[int] = []
    simulation.view._on_news = lambda: most.append(worker.load().num_slots_taken)
    simulation.run()
    assert max(most) == 33
    assert all(r.tpot_s < 0.02 for r in simulation.requests)
