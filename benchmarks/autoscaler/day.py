"""The autoscaler over a day of Azure's trace, against every fixed split of the same workers.

    python -m benchmarks.autoscaler.day TRACE [--requests 100000] [--seeds 1] [--png F]

The trace is laid on a daily curve (`traces.lay_on_day`). Workers are a small model on one CPU core;
a new one takes 90 s from the decision to its first request. The smallest fixed split is searched
for by total size: all its splits are tried from the middle out, until one reaches the goal. The
hidden errors of a seed (30% on every rate) and the arrivals are the same for all.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import DecodeRate, PairRate, PrefillRate, WorkerRates
from tandem.ops.simulator.autoscaled import reversals
from tandem.ops.simulator.autoscaled import run_autoscaled as simulate
from tandem.ops.simulator.output.report import is_good, summarize
from tandem.ops.simulator.scenario import Scenario, Slo
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import BLOCK_SIZE, DAY_S, Arrival, lay_on_day, read_trace
from tandem.router.admission.predict import TtftLimit
from tandem.router.placement.choose import choose
from tandem_bench.framework import RESULTS, Report, options, run_main

GOAL = 0.99
RATES = WorkerRates(
    prefill=PrefillRate(step_s=5e-3, token_s=1e-3, token_context_s=1e-7),
    decode=DecodeRate(step_s=1e-2, sequence_s=2e-3),
    step_tokens=512,
    block_bytes=BLOCK_SIZE * (22 << 10),
    measured=True,
)
SCENARIO = Scenario(
    kv_tokens=200_000,
    rates=RATES,
    pair=PairRate("nixl", 2e-3, 3e9),
    sequences_max=64,
    slo=Slo(TtftLimit(base_s=4.0, token_s=2e-3), tpot_s=0.1),
)


def run_fixed(arrivals: list[Arrival], prefill: int, decode: int, seed: int) -> dict[str, Any]:
    scenario = replace(SCENARIO, num_prefill=prefill, num_decode=decode, seed=seed)
    simulation = Simulation(scenario, arrivals, choose)
    simulation.run()
    return {
        "prefill": prefill,
        "decode": decode,
        "attainment": summarize(simulation, "tandem", 0).goodput,
        "worker_hours": (prefill + decode) * DAY_S / 3600,
    }


def run_autoscaled(arrivals: list[Arrival], config: AutoscaleConfig, seed: int) -> dict[str, Any]:
    simulation, autoscaled = simulate(replace(SCENARIO, seed=seed), arrivals, config)
    sizes = {role: pool.sizes for role, pool in autoscaled.pools.items()}
    turns = {role: reversals(changes) for role, changes in sizes.items()}
    gaps = [b - a for times in turns.values() for a, b in pairwise(times)]
    report = summarize(simulation, "tandem", 0)
    return {
        "attainment": report.goodput,
        "ttft_s": report.ttft_s,
        "tpot_s": report.tpot_s,
        "num_refused": report.num_refused,
        "worker_hours": autoscaled.worker_hours(),
        "num_changes": {role: len(changes) - 1 for role, changes in sizes.items()},
        "num_reversals": {role: len(times) for role, times in turns.items()},
        "reversals_nearest_s": min(gaps, default=None),
        "sizes": {r: [(round(t), n) for t, n in changes] for r, changes in sizes.items()},
        "good_by_hour": _good_by_hour(simulation),
        "lines": [f"{at / 3600:.2f} h {d.line}" for at, d in autoscaled.decisions],
    }


def smallest_fixed(arrivals: list[Arrival], first: int, seed: int) -> list[dict[str, Any]]:
    """Every split that was tried; the last one reaches the goal, and no smaller total does."""
    tried: list[dict[str, Any]] = []
    total = first
    while True:
        # From the split that was best a size below, outwards.
        best = max(tried, key=lambda t: t["attainment"], default=None)
        middle = best["prefill"] if best else round(0.65 * total)
        for prefill in sorted(range(1, total), key=lambda p: (abs(p - middle), -p)):
            if abs(prefill - middle) > 1:
                break
            tried.append(run_fixed(arrivals, prefill, total - prefill, seed))
            print(_told(tried[-1]), flush=True)
            if tried[-1]["attainment"] >= GOAL:
                return tried
        total += 1


def _good_by_hour(simulation: Simulation) -> list[float]:
    good, every = [0] * 24, [0] * 24
    for request in simulation.requests:
        hour = int(request.arrival.at_s // 3600) % 24
        every[hour] += 1
        good[hour] += bool(request.ended_s) and is_good(request, simulation.scenario.slo)
    return [round(g / max(1, n), 4) for g, n in zip(good, every, strict=True)]


def _told(run: dict[str, Any]) -> str:
    split = f"{run['prefill']}P{run['decode']}D" if "prefill" in run else "autoscaled"
    return f"{split}: {run['attainment']:.2%} good, {run['worker_hours']:.1f} worker-hours"


def plot(arrivals: list[Arrival], run: dict[str, Any], fixed: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 5), layout="constrained", height_ratios=(1, 2)
    )
    rates = [0.0] * 288
    for arrival in arrivals:
        rates[min(287, int(arrival.at_s // 300))] += 1 / 300
    above.plot([n / 12 for n in range(288)], rates, lw=1)
    above.set_ylabel("requests/s")
    for role, color in (("prefill", "tab:blue"), ("decode", "tab:orange")):
        changes = [*run["sizes"][role], (DAY_S, run["sizes"][role][-1][1])]
        hours, sizes = [t / 3600 for t, _ in changes], [n for _, n in changes]
        below.step(hours, sizes, where="post", color=color, label=f"{role}, autoscaled")
        below.axhline(fixed[role], color=color, ls=":", label=f"{role}, smallest fixed split")
    below.set_xlabel("hour of the day")
    below.set_ylabel("workers")
    below.legend(fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.set_xlim(0, 24)
    figure.suptitle(
        f"{run['attainment']:.2%} good at {run['worker_hours']:.0f} worker-hours; "
        f"fixed: {fixed['attainment']:.2%} at {fixed['worker_hours']:.0f}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


@options
class Options:
    requests: int = 100_000
    seeds: int = 1
    first: int = 5
    """Workers of the first fixed splits."""
    no_fixed: bool = False
    """Run only the autoscaler."""
    lines: bool = False
    """Print each decision."""
    png: Path | None = None
    output: Path = RESULTS / "autoscaler.json"


def main(trace: Path, /, arguments: Options = Options()) -> None:
    report = Report(arguments.output)
    started = time.process_time()
    config = AutoscaleConfig(
        mode="on",
        prefill_max=12,
        decode_max=8,
        ttft_s=SCENARIO.slo.ttft.base_s,
        ttft_token_s=SCENARIO.slo.ttft.token_s,
        itl_s=SCENARIO.slo.tpot_s,
    )
    arrivals = lay_on_day(read_trace(trace), arguments.requests)
    runs = []
    for seed in range(arguments.seeds):
        run = run_autoscaled(arrivals, config, seed)
        print(
            _told(run),
            f"changes {run['num_changes']}, reversals {run['num_reversals']},",
            f"the nearest two {run['reversals_nearest_s']} s apart; {run['ttft_s']}",
            run["good_by_hour"],
            f"{time.process_time() - started:.0f} s",
            flush=True,
        )
        if arguments.lines:
            print("\n".join(run["lines"]))
        run["seed"] = seed
        run.pop("lines")
        if not arguments.no_fixed:
            tried = smallest_fixed(arrivals, arguments.first, seed)
            run["fixed"] = tried
            run["saved"] = 1 - run["worker_hours"] / tried[-1]["worker_hours"]
            print(f"saved: {run['saved']:.1%}")
        runs.append(run)
    if arguments.no_fixed:
        return
    report.write(
        trace=trace.name,
        requests=arguments.requests,
        config=config,
        scenario={
            "rates": msgspec.to_builtins(RATES),
            "kv_tokens": SCENARIO.kv_tokens,
            "rate_error": SCENARIO.rate_error,
            "slo": SCENARIO.slo,
        },
        runs=runs,
    )
    if arguments.png:
        plot(arrivals, runs[0], runs[0]["fixed"][-1], arguments.png)
    print(f"{time.process_time() - started:.0f} s of CPU")


if __name__ == "__main__":
    run_main(main)
