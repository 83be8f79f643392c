"""Runs the autoscaler in the simulator, and resizes the simulated pools as it decides.

Every `interval_s` seconds, the autoscaler's policy gets an observation: a router's counters, and
the router's view of the workers' loads, which is a little old. An added worker is ready after a
cold start.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.ops.simulator.scenario import Scenario
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tandem.ops.simulator.workers.fleet import Fleet
from tandem.router.autoscaler.demand import Observation
from tandem.router.autoscaler.policy import Autoscaler, ScalingDecision
from tandem.router.placement.choose import choose
from tandem.router.scaling.pool_observation import likely_decode, see_pool


class Autoscaled:
    """The autoscaler of one simulation. It must be created before the simulation runs. The
    simulation must have the maximum number of workers of both pools."""

    def __init__(self, simulation: Simulation, config: AutoscaleConfig) -> None:
        # (simulated time in seconds, decision) of each decision that changed a pool's size.
        self.decisions: list[tuple[float, ScalingDecision]] = []
        self._simulation = simulation
        self._config = config
        self._policy = Autoscaler(config, simulation.clock.now_s)
        self.pools = {
            role: Fleet(
                simulation.clock,
                [w for w in simulation.workers.values() if w.role == role],
                cold_start_s=config.cold_start_s,
                on_start=simulation.start_worker,
                on_drain=simulation.drain_worker,
                on_stop=simulation.stop_worker,
            )
            for role in ("prefill", "decode")
        }

    def open(self, *, prefill: int, decode: int) -> None:
        """Sets the initial pool sizes and starts the autoscaler."""
        self.pools["prefill"].open(prefill)
        self.pools["decode"].open(decode)
        self._simulation.clock.after(self._config.interval_s, self._turn)

    def worker_hours(self) -> float:
        return sum(pool.pay() for pool in self.pools.values()) / 3600

    def _turn(self) -> None:
        simulation = self._simulation
        workers = simulation.view.roster.by_id.values()
        prefill = self.pools["prefill"]
        decode = self.pools["decode"]
        seen = Observation(
            now_s=simulation.clock.now_s,
            demand=simulation.meter.demand(),
            prefill=see_pool("prefill", workers, wanted=prefill.wanted),
            decode=see_pool("decode", workers, wanted=decode.wanted),
            decode_rate=likely_decode(workers),
        )
        for decision in self._policy.decide(seen):
            pool = self.pools[decision.role]
            if decision.to != decision.size:
                self.decisions.append((seen.now_s, decision))
                pool.resize(decision.to)
            pool.collect()
        if simulation.has_more:
            simulation.clock.after(self._config.interval_s, self._turn)


def run_autoscaled(
    scenario: Scenario, arrivals: Sequence[Arrival], config: AutoscaleConfig
) -> tuple[Simulation, Autoscaled]:
    """Runs a simulation with the autoscaler and the router's own placement. The pools start with
    their smallest sizes."""
    most = replace(scenario, num_prefill=config.prefill_max, num_decode=config.decode_max)
    simulation = Simulation(most, arrivals, choose)
    autoscaled = Autoscaled(simulation, config)
    autoscaled.open(prefill=config.prefill_min, decode=config.decode_min)
    simulation.run()
    return simulation, autoscaled


def reversals(sizes: list[tuple[float, int]]) -> list[float]:
    """Returns the times at which a pool that grew began to shrink, or the reverse. `sizes` is
    `Fleet.sizes`."""
    turns = []
    direction = 0
    for (_, before), (at_s, after) in pairwise(sizes):
        now = (after > before) - (after < before)
        if direction and now and now != direction:
            turns.append(at_s)
        direction = now or direction
    return turns
