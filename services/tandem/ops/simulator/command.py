"""The command `tandem simulate`: replays a trace under each placement policy and each load, and
reports the results."""

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.options import read
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import ConfigError
from tandem.ops.simulator.autoscaled import run_autoscaled
from tandem.ops.simulator.options import SimulateOptions, UsageError
from tandem.ops.simulator.output.report import RunReport, summarize
from tandem.ops.simulator.output.table import make_table, make_tier_table
from tandem.ops.simulator.policies import make_policy
from tandem.ops.simulator.scenario import Scenario, full_load_factor
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival, TraceError, repeat, scale_load, spread_bursts


def simulate(options: SimulateOptions) -> None:
    """Runs the simulations that the options describe, and prints or writes the results. Exits with
    status 1 if an input cannot be read."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with Waiting(ProgressRow(options.trace.name, "is read")):
            names = options.names()
            shares = options.shares()
            scenario = options.scenario()
            arrivals = options.arrivals()
            config = options.autoscaler()
    except OSError as error:
        _give_up(f"{error.filename} cannot be read: {error.strerror}")
    except (UsageError, TraceError, ConfigError, msgspec.MsgspecError) as error:
        _give_up(str(error))
    started = time.perf_counter()
    if options.autoscale:
        for share in shares:
            factor = full_load_factor(scenario, arrivals) * share
            report_autoscaled(scenario, scale_load(arrivals, factor or 1.0), config, console)
        return
    reports = run_all(scenario, arrivals, names, shares, options.seeds, options.requests, console)
    workers = f"{options.prefill} prefill + {options.decode} decode workers"
    title = f"{options.trace.name} on {workers} of {options.kv_tokens:,} tokens"
    console.print(make_table(reports, title))
    if scenario.rates.tiers:
        console.print(make_tier_table(reports))
    console.print(f"the simulations took {time.perf_counter() - started:.0f} s")
    if options.out:
        _write(Path(options.out), reports, scenario, title, console)


def run_all(
    scenario: Scenario,
    arrivals: list[Arrival],
    names: tuple[str, ...],
    shares: list[float],
    seeds: int,
    num_requests: int,
    console: Console,
) -> list[RunReport]:
    """Runs every policy at every load. A load in `shares` is a fraction of the workers' capacity; 0
    is the load of the trace as recorded. Runs with the same seed have the same arrivals and the
    same rate errors, so that policies can be compared."""
    reports: list[RunReport] = []
    num_runs = seeds * len(shares) * len(names)
    with Waiting() as waiting:
        for seed in range(seeds):
            seeded = replace(scenario, seed=seed)
            spread = spread_bursts(arrivals, seed)
            if num_requests:
                spread = repeat(spread, num_requests, seed)
            factor = full_load_factor(seeded, spread)
            for share in shares:
                timed = scale_load(spread, factor * share) if share else spread
                for name in names:
                    simulation = Simulation(seeded, timed, make_policy(name))
                    label = f"seed {seed}, load {share or 1 / factor:.0%}, {name}"
                    with waiting.polling(partial(_step, simulation, label, len(reports), num_runs)):
                        simulation.run()
                    reports.append(summarize(simulation, name, share or 1 / factor))
                    with waiting.hidden():
                        console.print(
                            f"{label}: goodput {reports[-1].goodput:.2%}", highlight=False
                        )
    return reports


def _step(simulation: Simulation, label: str, num_done: int, num_runs: int) -> ProgressRow:
    """Returns the progress of all runs. `num_done` runs have ended, and `simulation` is the current
    run."""
    done = num_done + simulation.share_begun
    return ProgressRow("simulation", f"run {num_done + 1} of {num_runs}: {label}", done, num_runs)


def report_autoscaled(
    scenario: Scenario, arrivals: list[Arrival], config: AutoscaleConfig, console: Console
) -> None:
    """Runs a simulation with the autoscaler. Prints each change of a pool's size with the reason,
    then goodput and worker-hours."""
    with Waiting(ProgressRow("simulation", f"{len(arrivals):,} requests")):
        simulation, autoscaled = run_autoscaled(scenario, arrivals, config)
    for at_s, decision in autoscaled.decisions:
        console.print(f"{at_s / 3600:6.2f} h  {decision.line}", highlight=False, soft_wrap=True)
    report = summarize(simulation, "tandem", 0.0)
    console.print(
        f"{report.num_good} of {report.num_requests} within the SLO ({report.goodput:.2%}), "
        f"{report.num_refused} refused; {autoscaled.worker_hours():.1f} worker-hours",
        highlight=False,
    )


def _write(
    folder: Path, reports: list[RunReport], scenario: Scenario, title: str, console: Console
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = msgspec.to_builtins({"title": title, "scenario": scenario, "reports": reports})
    (folder / "simulation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        from tandem.ops.simulator.output.plots import write_page, write_plots
    except ImportError:
        console.print(
            "no plots were made: they need matplotlib (pip install 'tandem-llm[simulate]')"
        )
        return
    with Waiting(ProgressRow("plots", "are drawn")):
        write_page(reports, title, write_plots(reports, folder), folder / "simulation.html")
    console.print(
        f"the results are in {folder}: simulation.html, simulation.json and PNGs", highlight=False
    )


def _give_up(why: str) -> NoReturn:
    print(f"tandem simulate: {why}", file=sys.stderr)
    raise SystemExit(1) from None


def main() -> None:
    simulate(read(SimulateOptions, "tandem simulate"))
