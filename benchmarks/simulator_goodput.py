"""Goodput under SLO at 10% to 120% load, on paired seeds, of this router's placement and of others.

    python benchmarks/simulator_goodput.py TRACE --case NAME [--seeds 5] [--processes 2] [--png F]

All policies see the same arrivals and the same hidden errors of a seed: rates off by up to 30%,
load 500 ms old. Each case is put into benchmarks/results/simulator_goodput.json under its name,
with what was seen at each load and the difference to the best other policy there, seed by seed.
`tandem-no-pulls` is the same placement where no worker may pull a prefix from another one, as none
may under the other policies (one seed). `--cells FILE` keeps what was run, to go on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from goodput_plot import plot
from tandem.ops.simulator.output.report import RunReport, summarize
from tandem.ops.simulator.policies import POLICIES, make_policy
from tandem.ops.simulator.scenario import Scenario, full_load_factor
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import (
    Arrival,
    read_trace,
    rename_prefixes,
    scale_load,
    shift_time,
    spread_bursts,
)

RESULT = Path(__file__).parent / "results" / "simulator_goodput.json"
LOADS = "10,30,50,70,80,90,100,110,120"
NO_PULLS = "tandem-no-pulls"
ALLOWED = 0.005  # at every load at least the best other policy's goodput less this


@cache
def read(path: str, shift_s: float, rename: str) -> list[Arrival]:
    arrivals = read_trace(Path(path))
    if shift_s:
        arrivals = shift_time(arrivals, shift_s)
    return rename_prefixes(arrivals, rename) if rename else arrivals


def run(arguments: argparse.Namespace, load: float, seed: int) -> list[RunReport]:
    """All policies once. Load 0: as recorded."""
    scenario = Scenario(num_decode=arguments.decode, num_prefill=arguments.prefill, seed=seed)
    spread = spread_bursts(read(arguments.trace, arguments.shift, arguments.rename), seed)
    factor = full_load_factor(scenario, spread)
    timed = scale_load(spread, factor * load) if load else spread
    reports = []
    for name in (*POLICIES, NO_PULLS) if seed == 0 else POLICIES:
        seen = replace(scenario, pull_prefixes=name != NO_PULLS)
        simulation = Simulation(seen, timed, make_policy(name.removesuffix("-no-pulls")))
        simulation.run()
        reports.append(summarize(simulation, name, load or 1 / factor))
    return reports


def table(reports: list[RunReport]) -> list[dict[str, Any]]:
    rows = []
    for load in dict.fromkeys(r.load for r in reports):
        here = [r for r in reports if r.load == load]
        goodput = {
            name: [round(100 * r.goodput, 3) for r in here if r.policy == name]
            for name in dict.fromkeys(r.policy for r in here)
        }
        others = {n: g for n, g in goodput.items() if n not in ("tandem", NO_PULLS)}
        best = max(others, key=lambda name: statistics.mean(others[name]))
        ours = [r for r in here if r.policy == "tandem"]
        pairs = zip(goodput["tandem"], others[best], strict=True)
        rows.append(
            {
                "load": round(100 * load, 1),
                "goodput": {n: round(statistics.mean(g), 2) for n, g in goodput.items()},
                "best_other": best,
                "difference_by_seed": [round(a - b, 2) for a, b in pairs],
                "tandem": {
                    "not_computed": _spread([100 * (r.hit_rate + r.pulled_rate) for r in ours]),
                    "cached": _spread([100 * r.hit_rate for r in ours]),
                    "busy_max_over_mean": _spread([r.load_busy for r in ours]),
                    "tokens_max_over_mean": _spread([r.load_tokens for r in ours]),
                },
            }
        )
    return rows


def _spread(values: list[float]) -> list[float]:
    """Lowest, mean, highest."""
    return [round(v, 3) for v in (min(values), statistics.mean(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--case", required=True)
    parser.add_argument("--loads", default=LOADS, help="%%; trace: as recorded")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--rename", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--cells", type=Path, help="JSON lines of what was run already")
    arguments = parser.parse_args()
    started = time.perf_counter()
    loads = [0.0 if text == "trace" else float(text) / 100 for text in arguments.loads.split(",")]
    cells = [(load, seed) for load in loads for seed in range(arguments.seeds)]
    by_cell = _read_cells(arguments.cells)
    with ProcessPoolExecutor(arguments.processes) as pool:
        done = {pool.submit(run, arguments, *c): c for c in cells if c not in by_cell}
        for future in as_completed(done):
            load, seed = done[future]
            by_cell[load, seed] = future.result()
            print(f"load {load:.0%}, seed {seed}: done", flush=True)
            if arguments.cells:
                with arguments.cells.open("ab") as file:
                    file.write(msgspec.json.encode((load, seed, by_cell[load, seed])) + b"\n")
    # As recorded, a seed's spread arrivals make the load a little different: one row all the same.
    reports = [
        RunReport(**{**_fields(r), "load": by_cell[load, 0][0].load})
        for load, seed in cells
        for r in by_cell[load, seed]
    ]
    rows = table(reports)
    for row in rows:
        least = min(row["difference_by_seed"])
        mean = statistics.mean(row["difference_by_seed"])
        word = "" if mean >= -100 * ALLOWED else "  BELOW"
        print(
            f"{row['load']:6.1f}% {row['goodput']} vs {row['best_other']}: mean {mean:+.2f}, "
            f"lowest {least:+.2f}{word}; {row['tandem']}"
        )
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    settings = {
        k: v for k, v in vars(arguments).items() if k not in ("case", "png", "processes", "cells")
    }
    settings["trace"] = Path(arguments.trace).name
    result[arguments.case] = {"settings": settings, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.png:
        title = f"{arguments.case}, mean of {arguments.seeds} seeds"
        plot({title: rows}, arguments.png, load="the workers", bold="tandem")
    print(f"{time.perf_counter() - started:.0f} s")


def _read_cells(path: Path | None) -> dict[tuple[float, int], list[RunReport]]:
    if path is None or not path.exists():
        return {}
    lines = path.read_bytes().splitlines()
    decoded = (msgspec.json.decode(line, type=tuple[float, int, list[RunReport]]) for line in lines)
    return {(load, seed): reports for load, seed, reports in decoded}


def _fields(report: RunReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


if __name__ == "__main__":
    main()
