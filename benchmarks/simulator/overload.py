"""Simulates `benchmarks/cluster/overload.py`: refusals and SLO of 1,000 short chats at each load.

    python -m benchmarks.simulator.overload [--seeds 20] [--requests 1000]

One prefill and one decode worker of SmolLM2 with a core each. The chats have the lengths of
`shared/chats.py`. As in the real run, the capacity is the rate of 8 clients that each send a
request as soon as the one before is answered, and the SLO follows from a lone request: 10 times its
TTFT and 5 times its ITL. Writes benchmarks/results/simulator_overload.json, and prints for each
load the mean and the worst seed of the refused share and of the share of the admitted requests
that keep the SLO. `late` is the share of requests that would be late if none were refused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, WorkerRates
from tandem.ops.simulator.output.report import is_good
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.requests import Request
from tandem.ops.simulator.scenario import Scenario, Slo
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival, scale_load
from tandem.router.admission.predict import OWN_TIMES, TtftLimit
from tandem_bench.framework import RESULTS, options, run_main, table, write

BLOCK = 16
SYSTEM_BLOCKS = 2
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
GOALS = {0.8: 0.01, 1.0: 0.05}  # load -> largest share of refused requests
KEPT_LEAST = 0.98
CLIENTS = 8
TTFT_SCALE, ITL_SCALE = 10, 5
# SmolLM2 in bfloat16 on one core: 190 ms for a chat's prompt, and 12 ms for a token.
RATES = WorkerRates(
    prefill=PrefillRate(step_s=0.02, token_s=9e-4, token_context_s=2e-7),
    decode=DecodeRate(step_s=0.0105, sequence_s=0.0015),
    block_bytes=368_640,
    measured=True,
)
PAIR = PairRate("nixl", 1e-4, 1.2e9)


@options
class Options:
    seeds: int = 20
    requests: int = 1000
    output: Path = RESULTS / "simulator_overload.json"


class ClosedLoop(Simulation):
    """Clients that send a request as soon as the one before is answered."""

    def run(self) -> None:
        for number in range(CLIENTS):
            self.clock.at(0.0, self._arrive, number)
        self.clock.run()

    def _plan_arrival(self, at: int) -> None:
        """Each client sends its next request in `_end`."""

    def _end(self, request: Request) -> None:
        super()._end(request)
        if self.has_more:
            self._arrive(len(self.requests))


def make_chats(count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, one a second, with one of four system prompts."""
    rng = Random(f"chats {seed}")
    arrivals, at_s, next_block = [], 0.0, 100
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        num_tokens = 55 + round(1.15 * rng.randrange(20, 200))
        num_own = -(-num_tokens // BLOCK) - SYSTEM_BLOCKS
        first = SYSTEM_BLOCKS * rng.randrange(4)
        ids = (*range(first, first + SYSTEM_BLOCKS), *range(next_block, next_block + num_own))
        next_block += num_own
        arrivals.append(Arrival(at_s, num_tokens, rng.randrange(16, 65), ids))
    return arrivals


def scenario_of(seed: int) -> Scenario:
    return Scenario(
        num_decode=1,
        num_prefill=1,
        kv_tokens=64_000,
        rates=RATES,
        pair=PAIR,
        sequences_max=64,
        itl_target_s=0.1,
        admission=False,
        slo=Slo(TtftLimit(60.0), 60.0),
        seed=seed,
        block_size=BLOCK,
    )


def run(scenario: Scenario, arrivals: Sequence[Arrival]) -> list[Request]:
    simulation = Simulation(scenario, arrivals, make_policy("tandem"))
    simulation.run()
    return simulation.requests


def measure_slo(scenario: Scenario) -> Slo:
    lone = [replace(a, at_s=60.0 * n) for n, a in enumerate(make_chats(15, 1))]
    seen = run(scenario, lone)
    ttft_s = TTFT_SCALE * statistics.median(r.ttft_s for r in seen)
    tpot_s = ITL_SCALE * statistics.median(r.tpot_s for r in seen)
    return Slo(TtftLimit(ttft_s, own_times=OWN_TIMES), tpot_s)


def measure_capacity(scenario: Scenario, count: int) -> float:
    """Returns the requests a second that 8 clients get answered."""
    simulation = ClosedLoop(scenario, make_chats(count, 2), make_policy("tandem"))
    simulation.run()
    return count / max(r.ended_s for r in simulation.requests)


def simulate(load: float, seed: int, count: int) -> dict[str, float]:
    scenario = scenario_of(seed)
    slo = measure_slo(scenario)
    rate = load * measure_capacity(scenario, count)
    chats = scale_load(make_chats(count, 100 + seed), rate)
    limited = replace(scenario, slo=slo, itl_limit_s=slo.tpot_s)
    open_to_all = run(limited, chats)
    seen = run(replace(limited, admission=True), chats)
    served = [r for r in seen if r.ended_s]
    return {
        "refused": sum(r.failure == "refused" for r in seen) / count,
        "by_router": sum(r.failure == "refused" and not r.num_submissions for r in seen) / count,
        "kept": sum(is_good(r, slo) for r in served) / max(1, len(served)),
        "kept_tpot": sum(r.tpot_s <= slo.tpot_s for r in served) / max(1, len(served)),
        "late": 1 - sum(is_good(r, slo) for r in open_to_all) / count,
        "rate_per_s": rate,
        "goodput_per_s": sum(is_good(r, slo) for r in served) / chats[-1].at_s,
        "ttft_p99_of_slo": sorted(r.ttft_s for r in served)[int(0.99 * len(served))]
        / slo.ttft.base_s,
    }


def main(args: Options = Options()) -> bool:
    began, rows = time.perf_counter(), []
    for load in LOADS:
        seen = [simulate(load, seed, args.requests) for seed in range(args.seeds)]
        rows.append({"load": load, **{key: _spread([s[key] for s in seen]) for key in seen[0]}})
    write(args.output, {"seeds": args.seeds, "requests": args.requests, "rows": rows})
    print(table("load | " + " | ".join(list(rows[0])[1:]), map(_cells, rows)))
    print(f"{time.perf_counter() - began:.0f} s")
    return not all(_is_met(row) for row in rows)


def _spread(values: Sequence[float]) -> list[float]:
    """Lowest, mean, highest."""
    return [round(v, 4) for v in (min(values), statistics.mean(values), max(values))]


def _cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['load']:g}"] + [
        f"{mean:.3f} ({low:.3f} to {high:.3f})" for low, mean, high in list(row.values())[1:]
    ]


def _is_met(row: dict[str, Any]) -> bool:
    is_refused_little = row["refused"][1] <= GOALS.get(row["load"], 1.0)
    return is_refused_little and row["kept"][1] >= KEPT_LEAST


if __name__ == "__main__":
    run_main(main)
