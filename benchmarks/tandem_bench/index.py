"""`tandem bench index`, as a command of its own: `python -m tandem_bench.index`.

Look-ups in the prefix tree, from hashes to a depth for each worker, while another process
publishes:

    replica   a router's replica of the tree, which follows Redis meanwhile; a look-up first lets
              the event loop do what is ready
    match     one call of RedisIndex.match, which routers make while a replica is not ready
    exists    a key for each block, one pipeline of EXISTS; it tells no worker apart
    radix     a radix tree in this process: what a router that shares with nobody has
    memory    MemoryIndex, a dictionary in this process: the simulator's, and the check of `match`

Each of them holds `--blocks` blocks in chains of 8,192, each with one holder (of EXISTS at most a
million, whose keys take far more memory); the chains that are looked up have 1, 8 and 64 holders
(64 are three shards). Look-ups take turns, and each is of a chain that is there whole, for a half,
or not at all. `--blocks` may be given several times: each is a run with a server of its own.

`--recovery` instead kills Redis, and then replaces the router's replica by a new one, while workers
with `--blocks` blocks publish and look-ups go on (index_recovery.py).
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, run
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.process.cancellation import cancel
from tandem.common.process.progress import ProgressRow, Waiting
from tandem.errors import ConfigError
from tandem.net.store.client import connect
from tandem.prefix_index.memory import MemoryIndex
from tandem.prefix_index.redis import RedisIndex
from tandem.prefix_index.replica import Replica
from tandem_bench.framework import write
from tandem_bench.index_publisher import BATCH_BLOCKS, READY, SILENT_S, random_chain
from tandem_bench.index_recovery import measure_recovery, show_recovery
from tandem_bench.index_trees import Trees, exists, fill, fill_others, hold
from tandem_bench.radix_tree import RadixTree

LOOKUP_BLOCKS = (32, 512, 8192)
HOLDERS = (1, 8, 64)
CHAINS_LOOKED_UP = 4
GOALS_MS = {512: 0.1, 8192: 0.2}  # of the replica: p50; p99 at most 6 times that
FOLLOWED_S = 10.0  # time for which the replica's CPU time and delay are measured
LOOKUPS_PER_S = 200  # look-ups while the delay is measured
CLUSTER_ID = "bench"
MEMORY_BYTES_MAX = 8 << 30

Lookup = Callable[[Sequence[bytes]], Awaitable[Any]]


def main(
    *,
    blocks: Annotated[
        list[int] | None,
        Parameter(
            help="Blocks in the tree, one run each. Default: 1000000.",
            negative=(),
            validator=Number(gte=1),
        ),
    ] = None,
    publish_rate: Annotated[int, Parameter(help="Blocks published a second meanwhile.")] = 100_000,
    samples: Annotated[
        int, Parameter(help="Look-ups of each kind.", validator=Number(gte=20))
    ] = 2000,
    recovery: Annotated[
        bool, Parameter(help="Measure how soon hits are back after a loss.", negative=())
    ] = False,
    output: Annotated[Path | None, Parameter(help="JSON file to write.")] = None,
) -> None:
    """Measure look-ups and publishing of the prefix tree."""
    console = Console(width=None if Console().is_terminal else 130)
    results: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_average_before": round(os.getloadavg()[0], 2),
        },
        "batch_blocks": BATCH_BLOCKS,
        "goals_ms": GOALS_MS,
        "runs": [],
    }
    for size in blocks or [1_000_000]:
        console.print(f"publishing {size:,} blocks", style="dim")
        with (
            EmbeddedRedis(memory_bytes_max=MEMORY_BYTES_MAX) as server,
            Waiting(redraws_per_s=0) as waiting,
        ):
            if recovery:
                run = asyncio.run(measure_recovery(server, size, waiting.show))
            else:
                run = asyncio.run(measure(server.url, size, publish_rate, samples, waiting.show))
        run["load_average"] = round(os.getloadavg()[0], 2)
        results["runs"].append(run)
        if recovery:
            show_recovery(run, console)
        else:
            show(run, console)
    if output is not None:
        write(output, results)
        console.print(f"written to {output}")


async def measure(
    url: str, blocks: int, publish_rate: int, samples: int, tell: Callable[[ProgressRow], None]
) -> dict[str, Any]:
    redis = connect(url)
    delays_s: list[float] = []
    replica = Replica(redis, CLUSTER_ID, bytes_max=MEMORY_BYTES_MAX, on_delay=delays_s.append)
    index = RedisIndex(redis, CLUSTER_ID, silent_s=SILENT_S)
    trees = Trees(redis, index, replica, MemoryIndex(), RadixTree())
    following: set[asyncio.Task[None]] = set()
    try:
        tell(ProgressRow("tree", f"{blocks:,} blocks are published"))
        results: dict[str, Any] = {"blocks": blocks, "publish_rate": publish_rate}
        results.update(await fill(redis, trees.index, blocks))
        await fill_others(trees, blocks)
        chains = {holders: await hold(trees, holders, CHAINS_LOOKED_UP) for holders in HOLDERS}
        await trees.index.open()
        tell(ProgressRow("replica", "the replica loads the tree"))
        following.add(asyncio.create_task(replica.run()))
        results["replica"] = await loaded(replica)
        publisher = await asyncio.to_thread(publish_meanwhile, url, publish_rate)
        try:
            await asyncio.sleep(1.0)
            tell(ProgressRow("replica", "the replica follows"))
            delays_s.clear()
            results["replica"] |= await follow(FOLLOWED_S)
            results["replica"]["delay_alone"] = percentiles(delays_s)
            delays_s.clear()
            await look_up_steadily(trees, chains[8], FOLLOWED_S)
            results["replica"]["delay_with_lookups"] = percentiles(delays_s)
            kinds = [(holders, length) for holders in HOLDERS for length in LOOKUP_BLOCKS]
            results["rows"] = []
            for number, (holders, length) in enumerate(kinds):
                note = f"{length:,} blocks of {holders} holder(s)"
                tell(ProgressRow("look-ups", note, number, len(kinds)))
                results["rows"].append(await row(trees, chains[holders], holders, length, samples))
        finally:
            publisher.stdin.close()  # type: ignore[union-attr]
            told = publisher.stdout.read() if publisher.stdout else ""
            publisher.wait(30)
        results["replica"] |= {
            "bytes_a_block": round(replica.num_bytes / replica.num_entries, 1),
            "loads": replica.num_loads,
        }
        results["published_meanwhile_per_s"] = float(told.split()[-1])
        return results
    finally:
        await cancel(*following)
        await redis.aclose()


async def loaded(replica: Replica) -> dict[str, float]:
    """Waits until a new replica answers."""
    began = time.monotonic()
    while not replica.is_usable:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return {"load_s": round(time.monotonic() - began, 2)}


async def follow(seconds: float) -> dict[str, float]:
    """Measures the CPU time of this process, which only follows the tree meanwhile."""
    began, cpu_began = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu_began) / (time.monotonic() - began)
    return {"share_of_a_core": round(share, 4)}


async def look_up_steadily(trees: Trees, chains: list[list[bytes]], seconds: float) -> None:
    """Looks up 512 blocks in the replica, `LOOKUPS_PER_S` times a second."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        await trees.look_up(random.choice(chains)[:512])
        await asyncio.sleep(1 / LOOKUPS_PER_S)


def publish_meanwhile(url: str, rate: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tandem_bench.index_publisher", url, CLUSTER_ID, str(rate)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        raise ConfigError("the bench's publisher did not come up")
    return process


async def row(
    trees: Trees, chains: list[list[bytes]], holders: int, length: int, samples: int
) -> dict[str, Any]:
    rng = random.Random(f"look-ups of {length}")
    methods: dict[str, Lookup] = {
        "replica": trees.look_up,
        "match": trees.index.match,
        "radix": trees.radix.match,
        "memory": trees.memory.match,
    }
    if holders == 1:
        methods["exists"] = lambda asked: exists(trees.redis, asked)
    count = max(20, samples // (1 if length <= 512 else 4))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(-5, count):  # the first few warm up
        asked = variant(rng, chains[turn % len(chains)][:length])
        found = await timed(methods, asked, seconds, counts=turn >= 0)
        if not found["match"] == found["memory"] == found["radix"] == found["replica"]:
            raise ConfigError("the tree, its replica and its twins in memory disagree")
    figures = {name: percentiles(taken) for name, taken in seconds.items()}
    return {"holders": holders, "blocks": length, "samples": count, **figures}


def variant(rng: random.Random, chain: list[bytes]) -> list[bytes]:
    """The chain as it is; or with another second half; or unknown from the start."""
    kept = rng.choice([len(chain), len(chain), len(chain) // 2, 0])
    return chain[:kept] + random_chain(rng, len(chain) - kept)


async def timed(
    methods: Mapping[str, Lookup],
    asked: list[bytes],
    seconds: dict[str, list[float]],
    *,
    counts: bool,
) -> dict[str, Any]:
    found = {}
    for name, method in methods.items():
        if name == "exists" and len(seconds[name]) >= 50:  # tens of milliseconds each
            continue
        began = time.perf_counter()
        found[name] = await method(asked)
        if counts:
            seconds[name].append(time.perf_counter() - began)
    return found


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 3),
    }


def show(results: dict[str, Any], console: Console) -> None:
    rate = results["published_meanwhile_per_s"]
    table = Table(
        title=f"{results['blocks']:,} blocks, {rate:,.0f} blocks a second published meanwhile",
        caption="p50 / p99, milliseconds",
    )
    for name in (
        "holders",
        "blocks",
        "replica",
        "goal",
        "match",
        "EXISTS, pipelined",
        "radix tree",
        "in memory",
    ):
        table.add_column(name, justify="right")
    for each in results["rows"]:
        goal = GOALS_MS.get(each["blocks"])
        table.add_row(
            str(each["holders"]),
            f"{each['blocks']:,}",
            _cell(each["replica"]),
            f"{goal:g} / {6 * goal:g}" if goal else "",
            _cell(each["match"]),
            _cell(each.get("exists")),
            _cell(each["radix"]),
            _cell(each["memory"]),
        )
    console.print(table)
    console.print(
        f"publishing alone: {results['publish_alone_per_s']:,} blocks a second; "
        f"{results['bytes_a_block']} bytes a block"
    )
    replica = results["replica"]
    console.print(
        f"replica: {replica['bytes_a_block']} bytes a block (goal 40), "
        f"{replica['share_of_a_core']:.1%} of a core (goal 10%), loaded in {replica['load_s']} s; "
        f"delay {_cell(replica['delay_alone'])} ms alone, and "
        f"{_cell(replica['delay_with_lookups'])} ms with {LOOKUPS_PER_S} look-ups a second "
        "(goal of p99: 50)"
    )


def _cell(figures: dict[str, float] | None) -> str:
    return f"{figures['p50_ms']:.3f} / {figures['p99_ms']:.3f}" if figures else ""


if __name__ == "__main__":
    run(main)
