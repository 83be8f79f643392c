"""Tests whether clients that hold connections and ask nothing delay the others.

    python -m tests.security.slow_connections [--number 10000] [--seconds 20] [--kinds silent,...]

A router with its default bounds, and a scripted worker that answers at once. 200 good clients at
127.0.0.1 and 127.0.0.3 ask 50 completions a second, each fifth on a new connection. For each kind
of slow client: the good ones alone, then beside 10,000 connections from 127.0.0.2 that have been
there for 10 s, then alone again. The slow clients are a process of their own and open what was
closed again. Prints the good ones' p50 and p99, the p99 relative to the mean of its quiet
neighbours, and the failures. Writes the rows of these kinds to
benchmarks/results/slow_connections.json.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from tandem_bench.framework import RESULTS, options, read, run_main, write
from tests.harness.good_clients import GoodClients
from tests.harness.router_process import RouterProcess, started_router
from tests.harness.slow_clients import KINDS, slow_clients

ARRIVAL_S = 10.0  # for the slow clients to come: 10,000 connections are a load of their own
DEPARTURE_S = 3.0


@options
class Options:
    number: int = 10_000
    """Slow connections."""
    seconds: float = 20.0
    """Seconds of each measurement."""
    reopen: float = 200.0
    """Connections that are opened again in a second."""
    kinds: str = ",".join(KINDS)
    json: Path = RESULTS / "slow_connections.json"


def main(arguments: Options = Options()) -> None:
    rows = asyncio.run(measure(arguments))
    kinds = read(arguments.json)
    for row in rows:
        row |= {"number": arguments.number, "seconds": arguments.seconds}
        kinds[row.pop("kind")] = row | {"reopened_a_second": arguments.reopen}
    write(arguments.json, kinds)


async def measure(arguments: Options) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        async with started_router(Path(folder)) as router:
            return await measure_kinds(router, arguments)


async def measure_kinds(router: RouterProcess, arguments: Options) -> list[dict[str, Any]]:
    rows = []
    http_port = router.http_port
    await ask(http_port, 5.0)  # warm-up
    quiet = await ask(http_port, arguments.seconds)
    for name in arguments.kinds.split(","):
        port = router.grpc_port if KINDS[name].is_grpc else http_port
        attack = slow_clients(name, port, arguments.number, reopen=arguments.reopen)
        await asyncio.to_thread(attack.__enter__)
        await asyncio.sleep(ARRIVAL_S)
        beside = await ask(http_port, arguments.seconds)
        await asyncio.to_thread(attack.__exit__, None, None, None)
        await asyncio.sleep(DEPARTURE_S)
        before = quiet
        quiet = await ask(http_port, arguments.seconds)
        row = {
            "kind": name,
            "p50_ms": beside.percentile_ms(0.5),
            "p99_ms": beside.percentile_ms(0.99),
            "quiet_p50_ms": (before.percentile_ms(0.5) + quiet.percentile_ms(0.5)) / 2,
            "quiet_p99_ms": (before.percentile_ms(0.99) + quiet.percentile_ms(0.99)) / 2,
            "requests": len(beside.times_s),
            "failures": len(beside.failures),
        }
        row["p99_ratio"] = row["p99_ms"] / row["quiet_p99_ms"]
        rows.append(row)
        print(
            f"{name:16} p50 {row['p50_ms']:6.2f} ms ({row['quiet_p50_ms']:6.2f} quiet), "
            f"p99 {row['p99_ms']:7.2f} ms ({row['quiet_p99_ms']:7.2f} quiet): "
            f"{row['p99_ratio']:.2f} times, {row['failures']} failures of {row['requests']}"
            + (f", such as {beside.failures[0]}" if beside.failures else ""),
            flush=True,
        )
    return rows


async def ask(port: int, seconds: float) -> GoodClients:
    clients = GoodClients(port)
    await clients.run(seconds)
    return clients


if __name__ == "__main__":
    run_main(main)
