from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tandem.common.perf_model.rates import TierRate
from tandem.engine.tiers.object_store.storage import REMEMBERED
from tandem.ops.simulator.output.report import summarize
from tandem.ops.simulator.output.table import tier_columns, tier_rows
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.scenario import KNOWN_IN_STORE, Fault, Scenario
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tests.unit.ops.simulator.test_simulation import EXACT, many

FAST_S = 1e-3  # to load a block of 512 tokens, which takes 34 ms to compute
ONE = replace(EXACT, num_decode=1, kv_tokens=10 * 512)


def with_tiers(
    scenario: Scenario, num_blocks: int = 40, policy: str = "lru", **block_s: float
) -> Scenario:
    tiers = tuple(TierRate(name, seconds) for name, seconds in block_s.items())
    rates = msgspec.structs.replace(scenario.rates, tiers=tiers)
    sizes = (num_blocks,) * len(tiers)
    return replace(scenario, rates=rates, tier_blocks=sizes, tier_policy=policy)


def run(scenario: Scenario, arrivals: list[Arrival], policy: str = "tandem") -> Simulation:
    simulation = Simulation(scenario, arrivals, make_policy(policy))
    simulation.run()
    for worker in simulation.workers.values():
        worker.cache.check_integrity()
        assert worker.tiers is not None
        worker.tiers.check_integrity()
        if worker.is_up:
            assert worker.is_idle
            load = worker.load()
            assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 0, 0)
    return simulation


def ask(at_s: float, first: int, num_blocks: int = 8, *, session: bool = False) -> Arrival:
    """A prompt of whole blocks and one token, so that all blocks can be reused."""
    block_ids = tuple(range(first, first + num_blocks))
    return Arrival(at_s, num_blocks * 512 + 1, 2, (*block_ids, -1 % 2**63), in_session=session)


def test_what_has_left_the_pool_comes_from_the_host() -> None:
    scenario = with_tiers(ONE, host=FAST_S)
    simulation = run(scenario, [ask(0.0, 0), ask(5.0, 100), ask(10.0, 0)])
    first, _, again = simulation.requests
    rates = scenario.rates
    assert first.ttft_s == pytest.approx(rates.prefill.seconds(8 * 512 + 1, 0, 512))
    # Of ten blocks in the pool the second prompt took nine: it left the first one of the first.
    here = again.cached_tokens - again.loaded_tokens["host"]
    assert (again.cached_tokens, here) == (8 * 512, 512)
    last_s = rates.prefill.seconds(1, 8 * 512, 512)
    assert again.ttft_s == pytest.approx(7 * FAST_S + last_s)
    report = summarize(simulation, "tandem", 1.0)
    assert report.loaded_bytes == {"host": 7.0 * rates.block_bytes}
    assert report.tier_hit_rates["host"] == pytest.approx(7 * 512 / (3 * (8 * 512 + 1)))
    assert tier_columns([report]) == ("load", "policy", "device", "host", "host GB")
    assert tier_rows([report]) == [("100", "tandem", "4.2", "29.2", "0.5")]


def test_a_worker_loads_blocks_for_a_peer() -> None:
    """At most half of its ten blocks at a time, as real workers do."""
    simulation = run(with_tiers(ONE, host=FAST_S), [ask(0.0, 0), ask(5.0, 100)])
    (worker,) = simulation.workers.values()
    hashes = ask(0.0, 0).block_digests()[:8]
    assert worker.cache.num_cached(hashes) == 1
    assert worker.load_for_peer([*hashes[:3], b"unknown"]) is None
    assert worker.load_for_peer(hashes) == (pytest.approx(5 * FAST_S), 6)
    assert worker.load_for_peer(hashes) == (0.0, 1)
    assert worker.load_for_peer(hashes[1:]) is None
    assert not worker.is_idle
    simulation.clock.run()
    assert worker.is_idle
    assert worker.cache.num_cached(hashes) == 6
    worker.cache.check_integrity()
    assert worker.load_for_peer(hashes) == (pytest.approx(2 * FAST_S), 8)
    simulation.clock.run()
    assert worker.load_for_peer(hashes) == (0.0, 8)


def test_a_worker_that_dies_ends_its_loads_for_peers() -> None:
    simulation = run(with_tiers(ONE, host=FAST_S), [ask(0.0, 0), ask(5.0, 100)])
    (worker,) = simulation.workers.values()
    assert worker.load_for_peer(ask(0.0, 0).block_digests()[:8]) is not None
    simulation.stop_worker(worker)
    simulation.start_worker(worker)
    simulation.clock.run()
    assert worker.is_idle
    worker.cache.check_integrity()
    assert worker.tiers is not None
    worker.tiers.check_integrity()


def test_a_slow_tier_is_left_alone_once_it_was_measured() -> None:
    scenario = with_tiers(ONE, host=10.0)
    turns = [ask(0.0, 0), ask(5.0, 100), ask(10.0, 0), ask(200.0, 100), ask(300.0, 0)]
    requests = run(scenario, turns).requests
    assert [sum(r.loaded_tokens.values()) > 0 for r in requests] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert requests[2].ttft_s > 70
    assert requests[4].ttft_s < 1


def test_both_ends_of_a_prompt_meet() -> None:
    """A tier that is about as fast as computing: each does about half."""
    scenario = with_tiers(replace(ONE, kv_tokens=42 * 512), 200, host=0.04)
    turns = [ask(0.0, 0, 40), ask(20.0, 100, 40), ask(40.0, 0, 40), ask(60.0, 100, 40)]
    last = run(scenario, turns).requests[-1]
    computed_s = scenario.rates.prefill.seconds(40 * 512 + 1, 0, 512)
    loaded = last.loaded_tokens["host"] // 512
    assert 10 < loaded < 30
    assert last.ttft_s < 0.8 * min(computed_s, 39 * 0.04)


def test_a_second_prompt_waits_for_the_load_of_the_first() -> None:
    scenario = with_tiers(ONE, host=0.01)
    turns = [ask(0.0, 0, 4), ask(5.0, 100), ask(10.0, 0, 4), ask(10.001, 0, 4), ask(10.002, 200, 3)]
    simulation = run(scenario, turns)
    _, _, third, fourth, other = simulation.requests
    assert third.loaded_tokens == {"host": 3 * 512}
    assert fourth.loaded_tokens == {}
    assert fourth.cached_tokens == 4 * 512
    report = summarize(simulation, "tandem", 1.0)
    assert report.loaded_bytes == {"host": 3.0 * scenario.rates.block_bytes}
    assert other.first_token_s < third.first_token_s  # it needs nothing of that load


def test_loads_begin_while_another_prompt_is_computed() -> None:
    scenario = with_tiers(replace(ONE, kv_tokens=30 * 512), 100, host=FAST_S)
    turns = [ask(0.0, 0, 8), ask(5.0, 100, 27), ask(10.0, 200, 16), ask(10.01, 0, 8)]
    *_, long, loaded = run(scenario, turns).requests
    assert loaded.loaded_tokens["host"] >= 6 * 512
    assert 0 < loaded.first_token_s - long.first_token_s < 5 * FAST_S + 8e-3


def test_value_takes_what_was_used_twice_or_is_of_a_session() -> None:
    once = ask(0.0, 0)
    session = ask(0.0, 0, session=True)
    for first, is_kept in ((once, False), (session, True)):
        turns = [first, ask(5.0, 100), ask(10.0, 0)]
        again = run(with_tiers(ONE, policy="value", host=FAST_S), turns).requests[2]
        assert (again.loaded_tokens != {}) is is_kept
    twice = [once, replace(once, at_s=2.0), ask(5.0, 100), ask(10.0, 0)]
    again = run(with_tiers(ONE, policy="value", host=FAST_S), twice).requests[3]
    assert again.loaded_tokens == {"host": 7 * 512}


@pytest.mark.parametrize(("tier", "is_there"), [("host", False), ("disk", True), ("store", True)])
def test_what_a_worker_that_died_finds_again(tier: str, is_there: bool) -> None:
    faults = (Fault(5.0, "decode-0", "down"), Fault(6.0, "decode-0", "up"))
    scenario = with_tiers(replace(ONE, faults=faults), **{tier: FAST_S})
    _, again = run(scenario, [ask(0.0, 0), ask(10.0, 0)]).requests
    assert again.loaded_tokens == ({tier: 8 * 512} if is_there else {})


def test_workers_share_the_store() -> None:
    faults = (Fault(5.0, "decode-0", "down"), Fault(5.0, "decode-1", "down"))
    first = run(with_tiers(EXACT, store=FAST_S), [ask(0.0, 0)]).requests[0]
    assert first.decode is not None
    fault = next(f for f in faults if f.worker_id == first.decode.worker_id)
    scenario = with_tiers(replace(EXACT, faults=(fault,)), store=FAST_S)
    first, second = run(scenario, [ask(0.0, 0), ask(10.0, 0)]).requests
    assert first.decode is not second.decode
    assert second.loaded_tokens == {"store": 8 * 512}
    assert KNOWN_IN_STORE == REMEMBERED


def test_placement_returns_to_the_worker_that_can_load() -> None:
    scenario = with_tiers(replace(ONE, num_decode=3), host=FAST_S)
    turns = [ask(0.0, 0), *(ask(3.0 + n, 100 * (n + 1)) for n in range(6)), ask(20.0, 0)]
    first, *_, last = run(scenario, turns).requests
    assert last.decode is first.decode
    assert sum(last.loaded_tokens.values()) > 0


@pytest.mark.parametrize("policy", ["tandem", "round-robin", "dynamo"])
@pytest.mark.parametrize("num_prefill", [0, 2])
@pytest.mark.parametrize("block_s", [FAST_S, 0.03])
def test_faults_under_load_end_every_request_once(
    policy: str, num_prefill: int, block_s: float
) -> None:
    scenario = replace(EXACT, num_prefill=num_prefill, kv_tokens=24 * 512, rate_error=0.3)
    arrivals = many(1.2, 200, scenario)
    end_s = arrivals[-1].at_s
    faults = tuple(
        Fault(end_s * share, worker_id, state)  # type: ignore[arg-type]
        for worker_id, start in (("decode-0", 0.1), ("decode-1", 0.5), ("prefill-1", 0.2))
        for share, state in ((start, "down"), (start + 0.1, "up"))
        if worker_id in scenario.roles
    )
    tiers = with_tiers(
        replace(scenario, faults=faults), 60, host=block_s, disk=3 * block_s, store=5 * block_s
    )
    simulation = run(tiers, arrivals, policy)
    assert all(bool(r.ended_s) != bool(r.failure) for r in simulation.requests)
