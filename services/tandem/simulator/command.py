"""The command: which trace, which workers, which policies and loads; what is written where."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tandem.config import AutoscaleConfig
from tandem.cost_model import WorkerRates
from tandem.errors import ConfigError
from tandem.router.admission.predict import TtftLimit
from tandem.simulator.autoscaled import run_autoscaled
from tandem.simulator.output.report import Report, summarize, to_json
from tandem.simulator.output.table import make_table
from tandem.simulator.policies import POLICIES, make_policy
from tandem.simulator.scenario import DEFAULT_RATES, Fault, Scenario, Slo, full_load_factor
from tandem.simulator.simulation import Simulation
from tandem.simulator.traces import (
    Arrival,
    TraceError,
    lay_on_day,
    read_trace,
    rename_prefixes,
    repeat,
    scale_load,
    shift_time,
    spread_bursts,
)

DEFAULT_LOADS = "10,20,30,40,50,60,70,80,90,100,110,120"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class UsageError(ValueError):
    """An option that cannot be taken."""


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="Mooncake's .jsonl or Azure's .csv")],
    decode: Annotated[int, typer.Option(help="decode workers")] = 8,
    prefill: Annotated[
        int, typer.Option(help="prefill workers; 0: decode workers prefill themselves")
    ] = 0,
    kv_tokens: Annotated[int, typer.Option(help="KV cache of each worker")] = 3_000_000,
    policies: Annotated[str, typer.Option(help="names, or all")] = "all",
    loads: Annotated[
        str, typer.Option(help="% of what the workers can carry; 'trace': as recorded")
    ] = DEFAULT_LOADS,
    requests: Annotated[
        int, typer.Option(help="so many: cut, or renamed copies added; 0: as recorded")
    ] = 0,
    seeds: Annotated[int, typer.Option(help="paired runs of each policy and load")] = 1,
    rates: Annotated[str, typer.Option(help="JSON file of WorkerRates; default: a guess")] = "",
    rate_error: Annotated[float, typer.Option(help="true rates differ by up to this")] = 0.3,
    cores: Annotated[
        float, typer.Option(help="all workers share one machine's cores; 0: each has its own")
    ] = 0.0,
    report_age: Annotated[float, typer.Option(help="ms: how old reported load is")] = 500.0,
    shift: Annotated[float, typer.Option(help="seconds into the trace to start at")] = 0.0,
    rename: Annotated[str, typer.Option(help="other prefixes, by this name")] = "",
    fault: Annotated[
        list[str] | None, typer.Option(help="SECONDS:WORKER:down or up, such as 60:decode-0:down")
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="ms to the first token")] = 2000.0,
    slo_ttft_token: Annotated[float, typer.Option(help="ms more for each prompt token")] = 0.2,
    slo_tpot: Annotated[float, typer.Option(help="ms of each next token")] = 100.0,
    pulls: Annotated[bool, typer.Option(help="workers may pull prefixes from holders")] = True,
    admission: Annotated[
        bool, typer.Option(help="refuse early what would miss the SLO, under every policy")
    ] = True,
    day: Annotated[int, typer.Option(help="so many requests, laid on a day's curve; 0: off")] = 0,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="pools of 1 to --prefill and --decode follow the load"),
    ] = False,
    cold_start: Annotated[float, typer.Option(help="seconds until an added worker serves")] = 90.0,
    out: Annotated[str, typer.Option(help="folder for JSON, PNG and HTML")] = "",
) -> None:
    """Replay a trace on simulated workers under this router's placement and under others."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        names = POLICIES if policies == "all" else tuple(policies.split(","))
        if unknown := set(names) - set(POLICIES):
            raise UsageError(f"no policy {', '.join(sorted(unknown))}; there are {POLICIES}")
        scenario = Scenario(
            num_decode=decode,
            num_prefill=prefill,
            kv_tokens=kv_tokens,
            rates=_read_rates(rates),
            rate_error=rate_error,
            cores=cores,
            report_age_s=report_age / 1000,
            pull_prefixes=pulls,
            faults=tuple(_read_fault(text) for text in fault or []),
            admission=admission,
            slo=Slo(TtftLimit(slo_ttft / 1000, slo_ttft_token / 1000), slo_tpot / 1000),
        )
        _check_faults(scenario)
        arrivals = read_trace(trace)
        if shift:
            arrivals = shift_time(arrivals, shift)
        if rename:
            arrivals = rename_prefixes(arrivals, rename)
        if day:
            arrivals = lay_on_day(arrivals, day)
        shares = [_read_load(text) for text in ("trace" if day else loads).split(",")]
        config = AutoscaleConfig(
            mode="on",
            prefill_min=min(1, prefill),
            prefill_max=prefill,
            decode_max=decode,
            ttft_s=scenario.slo.ttft.base_s,
            ttft_token_s=scenario.slo.ttft.token_s,
            itl_s=scenario.slo.tpot_s,
            cold_start_s=cold_start,
        )
    except (UsageError, TraceError, ConfigError, OSError, msgspec.MsgspecError) as error:
        print(f"tandem simulate: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    started = time.perf_counter()
    if autoscale:
        for share in shares:
            factor = full_load_factor(scenario, arrivals) * share
            tell_autoscaled(scenario, scale_load(arrivals, factor or 1.0), config, console)
        return
    reports = run_all(scenario, arrivals, names, shares, seeds, requests, console)
    title = f"{trace.name} on {prefill} prefill + {decode} decode workers of {kv_tokens:,} tokens"
    console.print(make_table(reports, title))
    console.print(f"{time.perf_counter() - started:.0f} s")
    if out:
        _write(Path(out), reports, scenario, title, console)


def run_all(
    scenario: Scenario,
    arrivals: list[Arrival],
    names: tuple[str, ...],
    shares: list[float],
    seeds: int,
    num_requests: int,
    console: Console,
) -> list[Report]:
    """Every policy sees the same arrivals and the same errors of a seed. Share 0: as recorded."""
    reports = []
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
                simulation.run()
                reports.append(summarize(simulation, name, share or 1 / factor))
                console.print(
                    f"seed {seed}, load {reports[-1].load:.0%}, {name}: "
                    f"goodput {reports[-1].goodput:.2%}",
                    highlight=False,
                )
    return reports


def tell_autoscaled(
    scenario: Scenario, arrivals: list[Arrival], config: AutoscaleConfig, console: Console
) -> None:
    """Each change of a pool with its reason, and what the day cost."""
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
    folder: Path, reports: list[Report], scenario: Scenario, title: str, console: Console
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = asdict(scenario) | {
        "rates": msgspec.to_builtins(scenario.rates),
        "pair": msgspec.to_builtins(scenario.pair),
    }
    result = {"title": title, "scenario": settings, "reports": to_json(reports)}
    (folder / "simulation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    try:
        from tandem.simulator.output.plots import write_page, write_plots
    except ImportError:
        console.print("no plots: they need matplotlib (pip install 'tandem-llm[simulate]')")
        return
    write_page(reports, title, write_plots(reports, folder), folder / "simulation.html")
    console.print(f"written: {folder}/simulation.html, .json and PNGs", highlight=False)


def _read_rates(path: str) -> WorkerRates:
    if not path:
        return DEFAULT_RATES
    rates = msgspec.json.decode(Path(path).read_bytes(), type=WorkerRates)
    return msgspec.structs.replace(rates, measured=True)


def _read_load(text: str) -> float:
    if text == "trace":
        return 0.0
    try:
        share = float(text) / 100
    except ValueError:
        share = 0.0
    if share <= 0:
        raise UsageError(f"--loads: {text!r} is no percentage above 0")
    return share


def _read_fault(text: str) -> Fault:
    parts = text.split(":")
    try:
        at_s, worker_id, state = float(parts[0]), parts[1], parts[2]
    except (ValueError, IndexError):
        raise UsageError(f"--fault: {text!r} is not SECONDS:WORKER:down or up") from None
    if state == "down":
        return Fault(at_s, worker_id, "down")
    if state == "up":
        return Fault(at_s, worker_id, "up")
    raise UsageError(f"--fault: {text!r} ends neither with down nor with up")


def _check_faults(scenario: Scenario) -> None:
    for fault in scenario.faults:
        if fault.worker_id not in scenario.roles:
            raise UsageError(f"--fault: no worker {fault.worker_id}: there are {scenario.roles}")


def main() -> None:
    app()
