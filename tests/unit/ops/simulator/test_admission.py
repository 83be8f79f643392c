"""The simulator and the router's gate decide alike on the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from redis.asyncio import Redis

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.errors import Overloaded
from tandem.ops.simulator.requests import Request
from tandem.ops.simulator.scenario import Slo
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.worker import SimulatedWorker, Task
from tandem.router.admission.calibration import Promise
from tandem.router.admission.controller import AdmissionController
from tandem.router.admission.predict import OWN_TIMES, TtftLimit
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Roster, Work, choose
from tandem.router.workers.cluster_view import ClusterView
from tests.unit.ops.simulator.test_simulation import EXACT, POOLS, many, run

LIMIT = TtftLimit(2.0, 2e-4, OWN_TIMES)


class Asked(Simulation):
    """A simulation beside which a gate is asked about each request, and told of its first token."""

    controller: AdmissionController
    metrics: Metrics
    by_gate: list[Promise | Overloaded | None]  # of each request, in the order of arrival
    last: tuple[Work, Placement]

    def place(
        self,
        work: Work,
        workers: Roster,
        matches: Mapping[str, int],
        rng: Random,
        *,
        refused: frozenset[str] = frozenset(),
    ) -> Placement | None:
        placement = choose(work, workers, matches, rng, refused=refused)
        if len(self.by_gate) < len(self.requests):
            assert placement is not None
            self.metrics.demand.output_tokens_mean = self.meter.output_tokens_mean
            try:
                decision = self.controller.admit(work, placement)
                self.by_gate.append(decision.promise)
            except Overloaded as error:
                self.by_gate.append(error)
        return placement

    def prefilled(self, worker: SimulatedWorker, task: Task) -> None:
        request = task.owner
        assert isinstance(request, Request)
        promise = self.by_gate[self.requests.index(request)]
        if isinstance(promise, Promise) and not request.first_token_s:
            self.controller.note_first_token(promise)
        super().prefilled(worker, task)


@pytest.mark.parametrize("scenario", [EXACT, POOLS], ids=["aggregated", "pools"])
def test_router_and_simulator_admit_the_same_requests(
    scenario: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = replace(EXACT if scenario is EXACT else POOLS, admission=True, slo=Slo(LIMIT))
    simulation = Asked(
        scenario,
        many(4.0 if scenario.num_prefill else 2.0, 300, scenario),
        lambda *arguments, **options: simulation.place(*arguments, **options),
    )
    monkeypatch.setattr(
        "tandem.router.admission.controller.time.monotonic", lambda: simulation.clock.now_s
    )
    view = ClusterView(ClusterConfig("test", "redis://127.0.0.1", "token"), Redis())
    view.redis_state = "ok"
    simulation.metrics = Metrics()
    simulation.by_gate = []
    config = RouterConfig(
        cluster=view.cluster,
        model="",
        served_model_name="",
        ttft_limit_s=LIMIT.base_s,
        ttft_limit_token_s=LIMIT.token_s,
    )
    simulation.controller = AdmissionController(
        config, view, simulation.metrics, have_tenants=lambda: False
    )
    simulation.run()
    refused = [isinstance(answer, Overloaded) for answer in simulation.by_gate]
    assert [not request.is_admitted for request in simulation.requests] == refused
    promises = [None if isinstance(a, Overloaded) else a for a in simulation.by_gate]
    assert [request.promise for request in simulation.requests] == promises
    assert 10 < sum(refused) < 290
    assert sum(promise is not None for promise in promises) > 10


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 1), (1, 1), (1, 2)])
def test_a_burst_meets_its_limit(num_prefill: int, num_decode: int) -> None:
    """At most 5% of the admitted prompts of 4,000 tokens are late, and at least 90% as many
    are admitted as in the largest burst that meets the limit without admission."""
    limit = TtftLimit(4.0)
    scenario = replace(
        EXACT,
        num_prefill=num_prefill,
        num_decode=num_decode,
        kv_tokens=10**6,
        slo=Slo(limit),
        rate_error=0.1,
    )

    def burst(size: int, *, admission: bool) -> list[float]:
        arrivals = [Arrival(1.0, 4000, 4, tuple(range(8 * n, 8 * n + 8))) for n in range(size)]
        requests = run(replace(scenario, admission=admission), arrivals).requests
        return sorted(r.ttft_s for r in requests if r.first_token_s)

    largest = max(n for n in range(1, 65) if burst(n, admission=False)[-1] <= limit.base_s)
    assert largest < 60
    took = burst(64, admission=True)
    assert sum(ttft_s > limit.base_s for ttft_s in took) <= 0.05 * len(took)
    assert len(took) >= 0.9 * largest
