"""A ten-fold step of load: the autoscaler against fixed splits, in real processes and simulated.

    python -m benchmarks.autoscaler.load_step [--gpu L4] [--simulate] [--seeds 4] [--json F]

Chats of some 1,200 prompt and 100 output tokens come at a low rate, at ten times that rate, and not
at all. The workers are real processes of `tandem up` whose engines sleep the step times of a named
GPU (`sleeping_engine.py`). The parts, in turn:

    fixed      each split P+D of the workers, all the time
    set-role   a wrong split, mended by `tandem set-role` ten seconds after the step
    auto       the autoscaler, from 1 + 1; then the seconds until the pools are 1 + 1 again
    zero       the autoscaler with a minimum of 0; a request to empty pools, some times

A good request has its first token within 2 s and its other tokens within 90 ms in the mean; one
that is refused is not good. Each part is also simulated, with the same arrivals. `--simulate` does
nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, Literal

from benchmarks.autoscaler.sleeping_engine import GPUS
from benchmarks.autoscaler.step_cluster import (
    SizeWatch,
    first_token_from_zero,
    replay,
    running,
)
from benchmarks.shared.chats import WORDS, Chat, LoopLag, Seen
from benchmarks.shared.cluster import Cluster
from tandem.common.config.autoscale import AutoscaleConfig
from tandem.common.perf_model.rates import PairRate
from tandem.ops.simulator.autoscaled import run_autoscaled
from tandem.ops.simulator.output.report import summarize
from tandem.ops.simulator.scenario import Scenario, Slo
from tandem.ops.simulator.simulation import Simulation
from tandem.ops.simulator.traces import Arrival
from tandem.router.admission.predict import TtftLimit
from tandem.router.placement.choose import choose
from tandem_bench.framework import RESULTS, Report, options, quantile, run_main, table, words

TTFT_S, TPOT_S = 2.0, 0.09
STEP = 10
PROMPT_WORDS = (800, 1500)
OUTPUT_TOKENS = (60, 140)
CONTEXT = 1250  # of a sequence that decodes, in the mean
TEMPLATE_TOKENS = 30
MAX = 4  # workers of a pool
SET_ROLE_AFTER_S = 10.0


def chats(seed: int, phases: list[tuple[float, float]]) -> list[Chat]:
    """Poisson arrivals; a phase is (seconds, chats a second)."""
    rng, start_s, made = Random(f"step {seed}"), 0.0, list[Chat]()
    for seconds, rate in phases:
        at_s = start_s + rng.expovariate(rate)
        while at_s < start_s + seconds:
            words = [rng.choice(WORDS) for _ in range(rng.randrange(*PROMPT_WORDS))]
            text = f"{rng.random()} {' '.join(words)}"
            made.append(
                Chat(at_s, ({"role": "user", "content": text},), rng.randrange(*OUTPUT_TOKENS))
            )
            at_s += rng.expovariate(rate)
        start_s += seconds
    return made


@options
class Options:
    gpu: Literal[tuple(GPUS)] = "L4"
    rate: float = 6.0
    """Chats a second after the step."""
    low: float = 40.0
    """Seconds before the step."""
    high: float = 120.0
    """Seconds after it."""
    load: float = 0.0
    """Seconds that a worker loads its weights."""
    workers: int = 5
    """Workers of each fixed split."""
    zero: int = 3
    """Wakes of empty pools."""
    seeds: int = 4
    """Seeds of the simulation; real processes take the first."""
    fixed: str = "3+2,2+3,2+2,3+1"
    """Splits of real processes."""
    parts: str = "fixed,set-role,auto,zero"
    lines: bool = False
    """Print each simulated decision."""
    simulate: bool = False
    """Start no real processes."""
    cold_start: float = 10.0
    interval: float = 2.0
    json: Path = RESULTS / "autoscaler_step.json"


def main(arguments: Options = Options()) -> None:
    report = Report(arguments.json)
    phases = [(arguments.low, arguments.rate / STEP), (arguments.high, arguments.rate)]
    runs = [chats(seed, phases) for seed in range(arguments.seeds)]
    config = AutoscaleConfig(
        mode="on",
        prefill_max=MAX,
        decode_max=MAX,
        ttft_s=TTFT_S,
        itl_s=TPOT_S,
        cold_start_s=arguments.cold_start,
        interval_s=arguments.interval,
    )
    result: dict[str, Any] = {
        "arguments": arguments,
        "requests": [len(sent) for sent in runs],
        "config": asdict(config),
        "slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
    }
    result["simulated"] = [simulate(sent, arguments, config) for sent in runs]
    show("simulated, means", means(result["simulated"]))
    if arguments.lines:
        print("\n".join(line for run in result["simulated"] for line in run[-1]["lines"]))
    if not arguments.simulate:
        result["real"] = measure(runs[0], arguments, config)
        show("real processes", result["real"])
    report.write(**result)


def means(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means of the same rows over the seeds; of the time to the smallest size the longest."""
    rows = []
    for same in zip(*runs, strict=True):
        goods = [row["attainment"] for row in same]
        row = _row(same[0]["name"], mean(goods), mean([row["worker_s"] for row in same]))
        small_s = [row.get("smallest_after_s") for row in same]
        row["smallest_after_s"] = None if None in small_s else max(small_s)
        rows.append({**row, "lowest": min(goods), "highest": max(goods)})
    return rows


def splits(workers: int) -> list[tuple[int, int]]:
    """Returns every split of so many workers, as (prefill, decode)."""
    return [(p, workers - p) for p in range(1, workers)]


def scenario_of(arguments: Options) -> Scenario:
    gpu = GPUS[arguments.gpu]
    return Scenario(
        kv_tokens=gpu.kv_tokens,
        rates=gpu.rates(CONTEXT),
        pair=PairRate("nixl", 2e-3, 3e9),
        rate_error=0.0,
        slo=Slo(TtftLimit(base_s=TTFT_S, token_s=0.0), TPOT_S),
    )


def simulate(sent: list[Chat], arguments: Options, config: AutoscaleConfig) -> list[dict[str, Any]]:
    scenario, span_s = scenario_of(arguments), arguments.low + arguments.high
    arrivals = [
        Arrival(c.at_s, _num_tokens(c), c.max_tokens, tuple(range(9 * n, 9 * n + 9)))
        for n, c in enumerate(sent)
    ]
    rows = []
    for count in (arguments.workers - 1, arguments.workers):
        for prefill, decode in splits(count):
            fixed = replace(scenario, num_prefill=prefill, num_decode=decode)
            simulation = Simulation(fixed, arrivals, choose)
            simulation.run()
            good = summarize(simulation, "tandem", 0).goodput
            rows.append(_row(f"{prefill} + {decode}", good, count * span_s))
    late = Arrival(span_s + 300.0, 100, 2, (10**9,))  # the simulation ends with the last request
    simulation, autoscaled = run_autoscaled(scenario, [*arrivals, late], config)
    good = summarize(simulation, "tandem", 0).goodput
    ended_s = max(r.ended_s for r in simulation.requests if r.arrival is not late)
    sizes = {role: pool.sizes for role, pool in autoscaled.pools.items()}
    worker_s = sum(_worker_seconds(changes, span_s) for changes in sizes.values())
    small_s = max(
        max((t for t, n in changes if t > span_s), default=0.0) for changes in sizes.values()
    )
    row = _row("autoscaler", good, worker_s)
    row["smallest_after_s"] = round(small_s - ended_s, 1) if small_s else None
    row["sizes"] = {role: [(round(t), n) for t, n in changes] for role, changes in sizes.items()}
    row["lines"] = [f"{at:.0f} s {d.line}" for at, d in autoscaled.decisions]
    return [*rows, row]


def _worker_seconds(changes: list[tuple[float, int]], until_s: float) -> float:
    ends = [t for t, _ in changes[1:]] + [until_s]
    return sum(
        n * max(0.0, min(end, until_s) - t) for (t, n), end in zip(changes, ends, strict=True)
    )


def _num_tokens(chat: Chat) -> int:
    return len(chat.messages[0]["content"].split()) + TEMPLATE_TOKENS


def _row(name: str, attainment: float, worker_s: float) -> dict[str, Any]:
    return {"name": name, "attainment": attainment, "worker_s": round(worker_s)}


def measure(sent: list[Chat], arguments: Options, config: AutoscaleConfig) -> list[dict[str, Any]]:
    parts, rows = words(arguments.parts), list[dict[str, Any]]()
    more = {"ttft_limit_s": TTFT_S, "load_s": arguments.load}
    if "fixed" in parts or "set-role" in parts:
        prefill, decode = 3, 2
        with running(arguments.gpu, prefill=prefill, decode=decode, **more) as cluster:
            if "fixed" in parts:
                for split in words(arguments.fixed):
                    prefill, decode = map(int, split.split("+"))
                    cluster.scale(prefill=prefill, decode=decode)
                    rows.append(asyncio.run(part(cluster, f"{prefill} + {decode}", sent)))
            if "set-role" in parts:
                cluster.scale(prefill=1, decode=4)
                at_s = arguments.low + SET_ROLE_AFTER_S
                rows.append(asyncio.run(part(cluster, "1 + 4, set-role", sent, mend_at_s=at_s)))
    if "auto" in parts:
        with running(arguments.gpu, prefill=1, decode=1, autoscale=config, **more) as cluster:
            rows.append(asyncio.run(part(cluster, "autoscaler", sent, smallest=(1, 1))))
    if "zero" in parts:
        config = replace(config, prefill_min=0, decode_min=0)
        with running(arguments.gpu, prefill=1, decode=1, autoscale=config, **more) as cluster:
            rows.append(asyncio.run(from_zero(cluster, arguments.zero)))
    return rows


async def part(
    cluster: Cluster,
    name: str,
    sent: list[Chat],
    *,
    mend_at_s: float | None = None,
    smallest: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Runs the load once on the cluster as it is."""
    await replay(
        cluster,
        [replace(c, at_s=i * 0.2) for i, c in enumerate(chats(99, [(9, 1)]))],
        time.perf_counter(),
    )
    await asyncio.sleep(2)  # until records tell of it
    async with SizeWatch(cluster) as watch, LoopLag() as lag:
        mending = asyncio.create_task(mend(cluster, watch, mend_at_s)) if mend_at_s else None
        seen = await replay(cluster, sent, watch.began)
        worker_s, ended_s = watch.worker_s, watch.seconds()
        small_s = await watch.until(smallest) if smallest else None
    row = _row(name, sum(map(is_good, seen)) / len(seen), worker_s)
    ok = [s for s in seen if s.status == 200 and not s.error]
    row["refused"] = sum(s.status == 429 for s in seen)
    row["failed"] = [s.error or str(s.status) for s in seen if s.status != 429 and s not in ok]
    row["ttft_s"] = {p: round(quantile([s.ttft_s for s in ok], p / 100), 3) for p in (50, 95, 99)}
    row["tpot_ms"] = {
        p: round(1000 * quantile([s.tpot_s for s in ok], p / 100), 1) for p in (50, 95, 99)
    }
    row["sizes"] = watch.changes
    row["smallest_after_s"] = round(small_s - ended_s, 1) if small_s else None
    row["client_loop_late_p99_ms"] = round(1000 * quantile(lag.lags_s, 0.99), 1)
    row["set_role_s"] = await mending if mending else None
    row["bad_at_s"] = [round(s.sent_at_s) for s in seen if not is_good(s)]
    print(json.dumps(row), flush=True)
    return row


async def mend(cluster: Cluster, watch: SizeWatch, at_s: float) -> float:
    """Makes 2 + 3 of 1 + 4 workers; returns the seconds that it took."""
    await asyncio.sleep(at_s - watch.seconds())
    began = time.perf_counter()
    await asyncio.to_thread(cluster.tandem, "set-role", "decode-3")
    return round(time.perf_counter() - began, 2)


async def from_zero(cluster: Cluster, times: int) -> dict[str, Any]:
    wakes, slept = [], []
    for chat in chats(7, [(1000, 1)])[:times]:
        # Traffic that ends: after sparse requests, a pause is no end.
        busy = [replace(c, at_s=0.1 * n, max_tokens=4) for n, c in enumerate(chats(8, [(80, 1)]))]
        await replay(cluster, busy, time.perf_counter())
        began = time.perf_counter()
        async with SizeWatch(cluster) as watch:
            await watch.until((0, 0))
        slept.append(round(time.perf_counter() - began, 1))
        wakes.append(await first_token_from_zero(cluster, replace(chat, at_s=0.0)))
        print(json.dumps(wakes[-1]), flush=True)
    more_s = [wake["more_s"] for wake in wakes]
    return {"name": "from zero", "wakes": wakes, "slept_after_s": slept, "more_s": median(more_s)}


def is_good(seen: Seen) -> bool:
    return seen.status == 200 and not seen.error and seen.ttft_s <= TTFT_S and seen.tpot_s <= TPOT_S


def show(title: str, rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        if "attainment" not in row:
            print(f"{row['name']}: first token {row['more_s']:.2f} s after the start (median)")
            continue
        spread = f" ({row['lowest']:.1%} to {row['highest']:.1%})" if "lowest" in row else ""
        after = row.get("smallest_after_s")
        good = f"{row['attainment']:.1%}{spread}"
        lines.append((row["name"], good, row["worker_s"], f"{after:.0f} s" if after else ""))
    print(table(f"{title} | within the SLO | worker-seconds | smallest size after idle", lines))


if __name__ == "__main__":
    run_main(main)
