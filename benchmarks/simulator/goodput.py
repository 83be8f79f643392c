"""Goodput under SLO at 10% to 120% load, on paired seeds, of this router's placement and of others.

    python -m benchmarks.simulator.goodput TRACE --case NAME [--seeds 5] [--processes 2] [--png F]

All policies see the same arrivals and the same hidden errors of a seed: rates off by up to 30%,
load 500 ms old. Each case is put into benchmarks/results/simulator_goodput.json under its name,
with what was seen at each load and the difference to the best other policy there, seed by seed.
`tandem-no-pulls` is the same placement where no worker may pull a prefix from another one, as none
may under the other policies (one seed). `--cells FILE` keeps what was run, to go on from there.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster.goodput_plot import plot
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
from tandem_bench.framework import RESULTS, options, read, run_main, words, write

LOADS = "10,30,50,70,80,90,100,110,120"
NO_PULLS = "tandem-no-pulls"
ALLOWED = 0.005  # at every load at least the best other policy's goodput less this


@cache
def read_arrivals(path: str, shift_s: float, rename: str) -> list[Arrival]:
    arrivals = read_trace(Path(path))
    if shift_s:
        arrivals = shift_time(arrivals, shift_s)
    return rename_prefixes(arrivals, rename) if rename else arrivals


def simulate(trace: str, arguments: Options, load: float, seed: int) -> list[RunReport]:
    """All policies once. Load 0: as recorded."""
    scenario = Scenario(num_decode=arguments.decode, num_prefill=arguments.prefill, seed=seed)
    spread = spread_bursts(read_arrivals(trace, arguments.shift, arguments.rename), seed)
    factor = full_load_factor(scenario, spread)
    timed = scale_load(spread, factor * load) if load else spread
    reports = []
    for name in (*POLICIES, NO_PULLS) if seed == 0 else POLICIES:
        seen = replace(scenario, pull_prefixes=name != NO_PULLS)
        simulation = Simulation(seen, timed, make_policy(name.removesuffix("-no-pulls")))
        simulation.run()
        reports.append(summarize(simulation, name, load or 1 / factor))
    return reports


def rows_of(reports: list[RunReport]) -> list[dict[str, Any]]:
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


@options
class Options:
    case: str
    """Name of the case in the results."""
    loads: str = LOADS
    """Loads in %; trace: as recorded."""
    seeds: int = 5
    decode: int = 8
    prefill: int = 0
    shift: float = 0.0
    rename: str = ""
    processes: int = 1
    png: Path | None = None
    cells: Path | None = None
    """File with JSON lines of what was run before."""
    output: Path = RESULTS / "simulator_goodput.json"


def main(trace: str, /, arguments: Options) -> None:
    started = time.perf_counter()
    loads = [0.0 if text == "trace" else float(text) / 100 for text in words(arguments.loads)]
    cells = [(load, seed) for load in loads for seed in range(arguments.seeds)]
    by_cell = _read_cells(arguments.cells)
    with ProcessPoolExecutor(arguments.processes) as pool:
        done = {pool.submit(simulate, trace, arguments, *c): c for c in cells if c not in by_cell}
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
    rows = rows_of(reports)
    for row in rows:
        least = min(row["difference_by_seed"])
        mean = statistics.mean(row["difference_by_seed"])
        word = "" if mean >= -100 * ALLOWED else "  BELOW"
        print(
            f"{row['load']:6.1f}% {row['goodput']} vs {row['best_other']}: mean {mean:+.2f}, "
            f"lowest {least:+.2f}{word}; {row['tandem']}"
        )
    result, unset = read(arguments.output), ("case", "png", "processes", "cells", "output")
    settings = {k: v for k, v in asdict(arguments).items() if k not in unset}
    settings["trace"] = Path(trace).name
    result[arguments.case] = {"settings": settings, "rows": rows}
    write(arguments.output, result)
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
    run_main(main)
