"""More requests than the cluster can serve: what is taken keeps the SLO, the rest is told at once.

    python -m benchmarks.cluster.overload [--seconds 60] [--prefill 1] [--decode 1]

A real cluster of SmolLM2 on this machine, and short chats (shared/chats.py) in an open loop:
Poisson arrivals, sent at their times whether the cluster keeps up or not. Three parts:

    quiet      one chat at a time: the SLO is 10 times its time to first token and 5 times its
               inter-token latency (as in Mooncake, FAST 2025), in the median
    capacity   8 clients that ask again at once, nothing refused: the requests served a second
    sweep      0.5 to 3 times the capacity, the same chats each time, on workers started with
               `--itl-limit` and a router with `--ttft-limit` at the SLO

Goodput is requests a second that kept both: the time to first token, and in the mean the time
between tokens. The first tenth of each run is left out. The last run has two tenants: one asks for
5 times the capacity, one for half of it, of whose requests 95% must be taken. The client says how
late its own event loop was. Writes benchmarks/results/overload.json and prints the tables of
docs/under_load.md; exit status 1 when one of the claims does not hold.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shared.chats import Chat, LoopLag, Seen, ask, chats
from benchmarks.shared.cluster import up
from benchmarks.shared.requests import client_of
from tandem_bench.framework import RESULTS, Report, options, quantile, run_main, table

LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
TENANTS = (("flood", 5.0), ("steady", 0.5))  # of the capacity
STEADY_LEAST = 0.95  # of its requests
TTFT_SCALE, ITL_SCALE = 10, 5  # times the quiet median
CLIENTS = 8
SETTLE = 0.1  # of a run, left out
REFUSED_MOST = {0.8: 0.01, 1.0: 0.05}  # of the requests, at these loads
GOODPUT_LEAST = 0.9  # of the peak
SLO_KEPT_LEAST = 0.98  # of the requests that were taken, at every load


@options
class Options:
    seconds: float = 60.0
    """Seconds of arrivals in each run."""
    prefill: int = 1
    """Prefill workers."""
    decode: int = 1
    """Decode workers."""
    seed: int = 0
    output: Path = RESULTS / "overload.json"


def main(options: Options = Options()) -> int:
    report, seconds = Report(options.output), options.seconds
    pools: tuple[str, ...] = ("--prefill", str(options.prefill), "--decode", str(options.decode))
    pools += ("--num-blocks", "4000")
    with up(*pools, "--ttft-limit", "0") as cluster:
        result = asyncio.run(measure_capacity(cluster.url, seconds / 2))
    print(json.dumps(result), flush=True)
    slo = result["slo"]
    limits = ("--itl-limit", f"{slo['itl_s']:.4f}", "--ttft-limit", f"{slo['ttft_s']:.3f}")
    result["sweep"] = []
    with up(*pools, *limits) as cluster:
        asyncio.run(warm_up(cluster.url))
        for load in LOADS:
            sent = chats(options.seed, f"load {load:g}")
            row = asyncio.run(measure(cluster.url, sent, load, seconds, result))
            result["sweep"].append(row)
            print(json.dumps(row), flush=True)
            cluster.wait_idle()
    with up(*pools, *limits, "--trust-tenant-header") as cluster:
        asyncio.run(warm_up(cluster.url))
        sent = chats(options.seed, "tenants", TENANTS)
        load = sum(share for _, share in TENANTS)
        result["tenants"] = asyncio.run(measure(cluster.url, sent, load, seconds, result))
    result["claims"] = claims(result)
    report.write(
        **result, seconds=seconds, pools={"prefill": options.prefill, "decode": options.decode}
    )
    print_tables(result)
    return not all(claim["holds"] for claim in result["claims"].values())


async def measure_capacity(url: str, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    async with client_of(url) as client:
        await warm_up(url)
        quiet = [
            await ask(client, chat, began=began) for chat in itertools.islice(chats(1, "quiet"), 15)
        ]
        endless = chats(2, "capacity")
        until = time.perf_counter() + seconds

        async def keep_asking() -> int:
            count = 0
            while time.perf_counter() < until:
                seen = await ask(client, next(endless), began=began)
                assert seen.status == 200, seen
                count += time.perf_counter() < until
            return count

        served = sum(await asyncio.gather(*(keep_asking() for _ in range(CLIENTS))))
    ttft_s = quantile([s.ttft_s for s in quiet], 0.5)
    itl_s = quantile([gap for s in quiet for gap in s.gaps_s], 0.5)
    return {
        "quiet": {"ttft_s": ttft_s, "itl_s": itl_s},
        "slo": {"ttft_s": TTFT_SCALE * ttft_s, "itl_s": ITL_SCALE * itl_s},
        "capacity_per_s": served / seconds,
    }


async def warm_up(url: str) -> None:
    """Sends requests until the workers have measured prompts and batches of several sizes."""
    async with client_of(url) as client:
        began, warm = time.perf_counter(), chats(3, f"warm {url}")
        for count in (1, 1, 2, 4, 8, 1):
            batch = list(itertools.islice(warm, count))
            await asyncio.gather(*(ask(client, chat, began=began) for chat in batch))
        await asyncio.sleep(2)  # until records tell of it


async def measure(
    url: str, endless: Iterator[Chat], load: float, seconds: float, so_far: dict[str, Any]
) -> dict[str, Any]:
    """One run at so many times the capacity."""
    rate = load * so_far["capacity_per_s"]
    in_time = itertools.takewhile(lambda chat: chat.at_s < seconds * rate, endless)
    sent = [replace(chat, at_s=chat.at_s / rate) for chat in in_time]
    began = time.perf_counter()

    async def one(client: httpx.AsyncClient, chat: Chat) -> Seen:
        await asyncio.sleep(max(0.0, chat.at_s - (time.perf_counter() - began)))
        return await ask(client, chat, began=began)

    async with client_of(url) as client, LoopLag() as lag:
        seen = list(await asyncio.gather(*(one(client, chat) for chat in sent)))
    settle_s = SETTLE * seconds
    counted = [s for s in seen if s.sent_at_s >= settle_s]
    slo, span_s = so_far["slo"], seconds - settle_s
    row = {"load": load, **summary(counted, slo, span_s)}
    tenants = sorted({s.tenant for s in counted} - {""})
    if tenants:
        of = {t: [s for s in counted if s.tenant == t] for t in tenants}
        row["tenants"] = {t: summary(of[t], slo, span_s) for t in tenants}
    row["client"] = {
        "loop_late_p99_ms": 1000 * quantile(lag.lags_s, 0.99),
        "cpu_share": lag.cpu_share,
        "sent_late_p99_ms": 1000
        * quantile([s.sent_at_s - c.at_s for s, c in zip(seen, sent, strict=True)], 0.99),
    }
    return row


def summary(seen: Sequence[Seen], slo: dict[str, float], span_s: float) -> dict[str, Any]:
    taken = [s for s in seen if s.status == 200 and not s.error]
    refused = [s for s in seen if s.status == 429]
    failed = [s for s in seen if s.status != 429 and (s.error or s.status != 200)]
    good = [s for s in taken if s.ttft_s <= slo["ttft_s"] and s.tpot_s <= slo["itl_s"]]
    gaps = [gap for s in taken for gap in s.gaps_s]
    refusals = [s.ended_s for s in refused]
    return {
        "offered_per_s": len(seen) / span_s,
        "goodput_per_s": len(good) / span_s,
        "taken": len(taken),
        "refused": len(refused),
        "failed": [s.error or str(s.status) for s in failed],
        "kept_slo_share": len(good) / max(1, len(taken)),
        "ttft_ms": {f"p{p}": 1000 * quantile([s.ttft_s for s in taken], p / 100) for p in (50, 99)},
        "itl_ms": {f"p{p}": 1000 * quantile(gaps, p / 100) for p in (50, 99)},
        "tpot_ms_p99": 1000 * quantile([s.tpot_s for s in taken], 0.99),
        "refusal_ms": {
            "p50": 1000 * quantile(refusals, 0.5),
            "p99": 1000 * quantile(refusals, 0.99),
            "max": 1000 * max(refusals, default=0.0),
        },
        "retry_after_s": {
            "min": min((s.retry_after_s for s in refused), default=0),
            "max": max((s.retry_after_s for s in refused), default=0),
        },
    }


def claims(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the claims: of refusals, of the highest load, of each load, of the steady tenant."""
    rows = result["sweep"]
    last = rows[-1]
    peak = max(row["goodput_per_s"] for row in rows)
    share = last["goodput_per_s"] / peak if peak else 0.0
    kept = {row["load"]: row["kept_slo_share"] for row in rows}
    num_failed = sum(len(row["failed"]) for row in rows)
    refused = {row["load"]: row["refused"] / (row["refused"] + row["taken"]) for row in rows}
    steady = result["tenants"]["tenants"]["steady"]
    num_steady = steady["taken"] + steady["refused"] + len(steady["failed"])
    steady_share = steady["taken"] / max(1, num_steady)
    return {
        "95% of what the steady tenant asks for is taken": {
            "holds": steady_share >= STEADY_LEAST,
            "share": steady_share,
        },
        "goodput is within 10% of the peak": {"holds": share >= GOODPUT_LEAST, "share": share},
        "at most 1% is refused at a load of 0.8, and 5% at 1": {
            "holds": all(refused[load] <= most for load, most in REFUSED_MOST.items()),
            **{f"{load:g}": refused[load] for load in REFUSED_MOST},
        },
        "98% of what is taken keeps the SLO at every load, and nothing fails": {
            "holds": min(kept.values()) >= SLO_KEPT_LEAST and not num_failed,
            **{f"{load:g}": share for load, share in kept.items()},
            "failed": num_failed,
        },
    }


def print_tables(result: dict[str, Any]) -> None:
    slo, quiet = result["slo"], result["quiet"]
    print(
        f"quiet: TTFT {1000 * quiet['ttft_s']:.0f} ms, inter-token {1000 * quiet['itl_s']:.1f} ms; "
        f"SLO {1000 * slo['ttft_s']:,.0f} ms and {1000 * slo['itl_s']:.0f} ms; "
        f"capacity {result['capacity_per_s']:.2f} requests/s"
    )
    tenants = result.get("tenants", {})
    rows = [(f"{row['load']:g}", row) for row in result["sweep"]]
    rows += [(f"5.5, {name}", row) for name, row in tenants.get("tenants", {}).items()]
    columns = "load | offered/s | goodput/s | taken | TTFT p50, p99 (ms)"
    columns += " | inter-token p50, p99 (ms) | refusal p50, p99, max (ms) | Retry-After (s)"
    print(table(columns, (cells_of(name, row) for name, row in rows)))
    for claim, found in result["claims"].items():
        figures = ", ".join(f"{k} {v:.2f}" for k, v in found.items() if k != "holds")
        print(f"{'PASS' if found['holds'] else 'FAIL'}: {claim} ({figures})")


def cells_of(name: str, row: dict[str, Any]) -> list[str]:
    names = ("ttft_ms", "itl_ms", "refusal_ms", "retry_after_s")
    ttft, itl, late, retry = (row[key] for key in names)
    share = row["taken"] / max(1, row["taken"] + row["refused"] + len(row["failed"]))
    return [
        name,
        f"{row['offered_per_s']:.2f}",
        f"{row['goodput_per_s']:.2f}",
        f"{share:.0%}",
        f"{ttft['p50']:,.0f}, {ttft['p99']:,.0f}",
        f"{itl['p50']:.0f}, {itl['p99']:.0f}",
        f"{late['p50']:.0f}, {late['p99']:.0f}, {late['max']:.0f}",
        f"{retry['min']} to {retry['max']}",
    ]


if __name__ == "__main__":
    run_main(main)
