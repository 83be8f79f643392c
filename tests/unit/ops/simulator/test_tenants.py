"""Tenants and priorities of a trace take turns at simulated workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tandem.ops.simulator.requests import Request
from tandem.ops.simulator.scenario import Scenario, Slo, full_load_factor
from tandem.ops.simulator.traces import Arrival
from tandem.router.admission.capacity import COMPLETION_TOKENS_LIKELY, work_s
from tandem.router.admission.predict import TtftLimit
from tests.counted_turns import note_counted
from tests.unit.ops.simulator.test_simulation import EXACT, POOLS, run

SPAN_S = 12.0


def mix(scenario: Scenario, loads: dict[str, float], seed: int = 0) -> list[Arrival]:
    """Poisson arrivals of tenants over SPAN_S; `loads` are fractions of the capacity."""
    rng = Random(seed)

    def one(at_s: float, tenant: str) -> Arrival:
        ids = tuple(rng.getrandbits(40) for _ in range(4))
        return Arrival(at_s, rng.randrange(500, 2000), rng.randrange(16, 64), ids, tenant=tenant)

    probe = [one(0.1 * number, "") for number in range(200)]
    rate = 10 * full_load_factor(scenario, probe)
    arrivals = []
    for tenant, load in loads.items():
        at_s = rng.expovariate(rate * load)
        while at_s < SPAN_S:
            arrivals.append(one(at_s, tenant))
            at_s += rng.expovariate(rate * load)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def share_served(requests: list[Request], tenant: str, limit_s: float) -> float:
    own = [r for r in requests if r.arrival.tenant == tenant]
    return sum(bool(r.ended_s) and r.ttft_s <= limit_s for r in own) / len(own)


@pytest.mark.parametrize("limit_s", [2.0, 20.0])
@pytest.mark.parametrize("scenario", [EXACT, POOLS], ids=["aggregated", "pools"])
def test_a_tenant_within_its_share_is_served_beside_a_flood(
    scenario: Scenario, limit_s: float
) -> None:
    scenario = replace(scenario, slo=Slo(TtftLimit(limit_s)), admission=True, rate_error=0.1)
    requests = run(scenario, mix(scenario, {"flood": 5.0, "steady": 0.4})).requests
    assert all(bool(r.ended_s) != bool(r.failure) for r in requests)  # exactly one outcome
    assert share_served(requests, "steady", limit_s) >= 0.95
    assert share_served(requests, "flood", limit_s) >= 0.05


def test_without_turns_the_flood_takes_the_steady_tenants_share() -> None:
    """So the test above can fail."""
    scenario = replace(POOLS, slo=Slo(TtftLimit(2.0)), admission=True, rate_error=0.1)
    arrivals = mix(scenario, {"flood": 5.0, "steady": 0.4})
    simulation = run(scenario, [replace(a, tenant="") for a in arrivals])
    steady = [r for a, r in zip(arrivals, simulation.requests, strict=True) if a.tenant == "steady"]
    assert sum(bool(r.ended_s) for r in steady) < 0.8 * len(steady)


def test_earlier_priorities_have_shorter_waits_and_no_later_one_starves() -> None:
    scenario = replace(POOLS, slo=Slo(TtftLimit(20.0)), admission=True)
    rng = Random(1)
    arrivals = mix(scenario, {"": 3.0})
    sent = [replace(a, priority=rng.choice((-1, -1, 1))) for a in arrivals]
    requests = [r for r in run(scenario, sent).requests if r.arrival.at_s < SPAN_S / 2]
    waits = {
        p: [r.ttft_s for r in requests if r.ended_s and r.arrival.priority == p] for p in (-1, 1)
    }
    assert sum(waits[-1]) / len(waits[-1]) < 0.7 * sum(waits[1]) / len(waits[1])
    shares = {p: len(w) / sum(r.arrival.priority == p for r in requests) for p, w in waits.items()}
    assert shares[-1] >= shares[1] > 0.5


def test_requests_count_what_they_took_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers are longer than a router assumes of a request that waits."""
    rng = Random(3)
    num_tokens = 2 * COMPLETION_TOKENS_LIKELY
    arrivals = [
        Arrival(0.01 * number, 512, num_tokens, (rng.getrandbits(40),), tenant="ab"[number % 2])
        for number in range(60)
    ]
    scenario = replace(POOLS, slo=Slo(TtftLimit(4.0)), admission=True)
    counted_s = note_counted(monkeypatch)
    simulation = run(scenario, arrivals)
    served = [r for r in simulation.requests if r.ended_s]
    assert 0 < len(served) < len(arrivals)  # the others were refused, some after they had waited
    took_s = work_s(simulation.view.roster.by_id.values(), 512, num_tokens)
    assert sum(counted_s) == pytest.approx(len(served) * took_s, rel=1e-3)
