"""Hits of an agents' trace by tier policy, simulated, beside those of the engine.

    python -m benchmarks.tiers.simulated [--requests 400] [--seed 0]

The trace, the pool and the host tier are those of benchmarks/tiers/agents.py, whose results of the
real engine stand beside the simulated ones: requests come one after another, and a load is always
made. `tandem simulate` runs the same simulation; here its workers get no rates that differ. Writes
benchmarks/results/tier_simulated.json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.simulator.agents_trace import BLOCK, Request, Trace, mooncake_rows
from benchmarks.tiers.policies import DEVICE
from tandem.common.perf_model.rates import TierRate
from tandem.ops.simulator.output.report import RunReport, summarize
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.scenario import DEFAULT_RATES, Scenario
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tandem_bench.framework import RESULTS, Report, options, read, run_main

REAL = RESULTS / "tier_agents.json"
APART_S = 10.0  # between requests: each ends before the next
HOST_S = 1e-6  # to load a block: sooner than computing it, as the engine believes in agents.py
# Policies by their names in the results of the engine: that of the tier, and whether it is told of
# sessions.
POLICIES = {
    "lru": ("lru", False),
    "prefix": ("prefix", False),
    "value": ("value", False),
    "value, sessions": ("value", True),
}


def arrivals_of(requests: list[Request]) -> list[Arrival]:
    return [
        Arrival(
            number * APART_S,
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"]),
            in_session=bool(row["session_id"]),
        )
        for number, row in enumerate(mooncake_rows(requests))
    ]


def simulated(
    arrivals: list[Arrival], pool_blocks: int, host_blocks: int, policy: str, *, sessions: bool
) -> RunReport:
    rates = msgspec.structs.replace(
        DEFAULT_RATES, block_bytes=1, tiers=(TierRate("host", HOST_S),) if host_blocks else ()
    )
    scenario = Scenario(
        num_decode=1,
        kv_tokens=pool_blocks * BLOCK,
        tier_blocks=(host_blocks,) if host_blocks else (),
        tier_policy=policy,
        rates=rates,
        rate_error=0.0,
        admission=False,
        block_size=BLOCK,
    )
    told = arrivals if sessions else [replace(a, in_session=False) for a in arrivals]
    simulation = Simulation(scenario, told, make_policy("tandem"))
    simulation.run()
    report = summarize(simulation, "tandem", 0.0)
    assert report.num_served == len(arrivals)
    return report


@options
class Options:
    requests: int = 400
    seed: int = 0
    real: Path = REAL
    """Results of tiers/agents.py."""
    output: Path = RESULTS / "tier_simulated.json"


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    trace = Trace(args.seed)
    requests = list(trace.requests(args.requests))
    arrivals = arrivals_of(requests)
    pool = max(int(DEVICE * trace.working_set), max(len(r.blocks) for r in requests) + 64)
    all_blocks = len({block for request in requests for block in request.blocks})
    real = read(args.real)
    is_same = (real["requests"], real["seed"]) == (args.requests, args.seed)
    infinite = simulated(arrivals, pool, all_blocks, "lru", sessions=False).hit_rate
    rows = {}
    print(f"infinite: {infinite:.3f}; without a tier: ", end="")
    print(f"{simulated(arrivals, pool, 0, 'lru', sessions=False).hit_rate:.3f}")
    for name, (policy, sessions) in POLICIES.items():
        run = simulated(arrivals, pool, trace.working_set, policy, sessions=sessions)
        row = {
            "hits": run.hit_rate,
            "host": run.tier_hit_rates["host"],
            "of_infinite": run.hit_rate / infinite,
        }
        if is_same:
            row["real"] = real["rows"][name]["hits"]
        rows[name] = row
        print(name, {key: f"{value:.3f}" for key, value in row.items()})
    report.write(
        requests=args.requests,
        seed=args.seed,
        working_set=trace.working_set,
        device=pool,
        blocks=all_blocks,
        infinite=infinite,
        rows=rows,
    )


if __name__ == "__main__":
    run_main(main)
