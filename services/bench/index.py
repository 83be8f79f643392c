"""`tandem bench index`, as a command of its own: `python -m services.bench.index`.

The prefix tree in Redis through Tandem's client, from hashes to a depth for each worker, while
another process publishes; beside it what simpler ways take in the same run:

    match     one call of RedisIndex.match
    exists    a key for each block, one pipeline of EXISTS; it tells no worker apart
    memory    MemoryIndex, a dictionary in this process: what a router that shares with nobody has

The tree holds `--blocks` blocks in chains of 8,192, each with one holder; the chains that are
looked up have 1, 8 and 64 of them (64 are three shards). Look-ups take turns, and each is of a
chain that is there whole, for a half, or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.bench.index_publisher import BATCH_BLOCKS, READY, random_chain
from services.cluster.embedded_redis import EmbeddedRedis
from services.errors import ConfigError
from services.prefix_index.memory import MemoryIndex
from services.prefix_index.protocol import PrefixIndex
from services.prefix_index.redis import RedisIndex
from services.redis_client import Client, connect

CHAIN_BLOCKS = 8192
LOOKUP_BLOCKS = (32, 512, 8192)
HOLDERS = (1, 8, 64)
CHAINS_LOOKED_UP = 4
GOALS_MS = {512: 0.3, 8192: 1.5}  # p50; p99 at most 4 times that
CLUSTER_ID = "bench"

Lookup = Callable[[Sequence[bytes]], Awaitable[Any]]


def main(
    blocks: Annotated[int, typer.Option(help="blocks in the tree")] = 1_000_000,
    publish_rate: Annotated[int, typer.Option(help="blocks a second meanwhile")] = 100_000,
    samples: Annotated[int, typer.Option(min=20, help="look-ups of each kind")] = 2000,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure look-ups and publishing of the prefix tree."""
    console = Console(width=None if Console().is_terminal else 130)
    with EmbeddedRedis(memory_bytes_max=8 << 30) as server:
        results = asyncio.run(measure(server.url, blocks, publish_rate, samples, console))
    results["load_average"] = os.getloadavg()
    show(results, console)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {output}")


async def measure(
    url: str, blocks: int, publish_rate: int, samples: int, console: Console
) -> dict[str, Any]:
    redis = connect(url)
    index, memory = RedisIndex(redis, CLUSTER_ID), MemoryIndex()
    try:
        console.print(f"publishing {blocks:,} blocks", style="dim")
        results: dict[str, Any] = {"blocks": blocks, "publish_rate": publish_rate}
        results.update(await fill(redis, index, blocks))
        chains = {
            holders: await hold(index, memory, holders, CHAINS_LOOKED_UP) for holders in HOLDERS
        }
        for each in chains[1]:
            await redis.mset({b"exists:" + block_hash: b"" for block_hash in each})
        publisher = await asyncio.to_thread(publish_meanwhile, url, publish_rate)
        try:
            results["rows"] = [
                await row(redis, index, memory, chains[holders], holders, length, samples)
                for holders in HOLDERS
                for length in LOOKUP_BLOCKS
            ]
        finally:
            publisher.stdin.close()  # type: ignore[union-attr]
            told = publisher.stdout.read() if publisher.stdout else ""
            publisher.wait(30)
        results["published_meanwhile_per_s"] = float(told.split()[-1])
        return results
    finally:
        await redis.aclose()


async def fill(redis: Client, index: RedisIndex, blocks: int) -> dict[str, float]:
    """One worker publishes everything, alone: blocks a second, and bytes a block."""
    await index.reset("holder", "bench:1")
    before = (await redis.info("memory"))["used_memory"]
    rng, number, took_s = random.Random("bulk"), 0, 0.0
    for start in range(0, blocks, CHAIN_BLOCKS):
        chain = random_chain(rng, min(CHAIN_BLOCKS, blocks - start))
        began = time.perf_counter()
        number = await publish(index, "holder", chain, number)
        took_s += time.perf_counter() - began
    used = (await redis.info("memory"))["used_memory"] - before
    return {"publish_alone_per_s": round(blocks / took_s), "bytes_a_block": round(used / blocks, 1)}


async def hold(
    index: RedisIndex, memory: MemoryIndex, holders: int, count: int
) -> list[list[bytes]]:
    """`count` whole chains that `holders` workers have."""
    rng = random.Random(f"chains of {holders}")
    chains = [random_chain(rng, CHAIN_BLOCKS) for _ in range(count)]
    for worker in range(holders):
        worker_id, number = f"worker-{holders}-{worker}", 0
        for each in (index, memory):
            await each.reset(worker_id, "bench:1")
            number = 0
            for chain in chains:
                number = await publish(each, worker_id, chain, number)
    return chains


async def publish(index: PrefixIndex, worker_id: str, chain: list[bytes], number: int) -> int:
    """The chain in batches as workers send them; answers the next sequence number."""
    for start in range(0, len(chain), BATCH_BLOCKS):
        batch = chain[start : start + BATCH_BLOCKS]
        if not await index.publish(worker_id, "bench:1", number, batch, []):
            raise ConfigError(f"the tree refused batch {number} of {worker_id}")
        number += 1
    return number


def publish_meanwhile(url: str, rate: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.bench.index_publisher", url, CLUSTER_ID, str(rate)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        raise ConfigError("the bench's publisher did not come up")
    return process


async def row(
    redis: Client,
    index: RedisIndex,
    memory: MemoryIndex,
    chains: list[list[bytes]],
    holders: int,
    length: int,
    samples: int,
) -> dict[str, Any]:
    rng = random.Random(f"look-ups of {length}")
    methods: dict[str, Lookup] = {"match": index.match, "memory": memory.match}
    if holders == 1:
        methods["exists"] = lambda asked: exists(redis, asked)
    count = max(20, samples // (1 if length <= 512 else 4))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(-5, count):  # the first few warm up
        asked = variant(rng, chains[turn % len(chains)][:length])
        found = await timed(methods, asked, seconds, counts=turn >= 0)
        if found["match"] != found["memory"]:
            raise ConfigError("the tree and its twin in memory disagree")
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


async def exists(redis: Client, asked: Sequence[bytes]) -> int:
    async with redis.pipeline(transaction=False) as pipe:
        for block_hash in asked:
            pipe.exists(b"exists:" + block_hash)
        replies = await pipe.execute()
    return replies.index(0) if 0 in replies else len(replies)


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
    for name in ("holders", "blocks", "match", "goal", "EXISTS, pipelined", "in memory"):
        table.add_column(name, justify="right")
    for each in results["rows"]:
        goal = GOALS_MS.get(each["blocks"])
        table.add_row(
            str(each["holders"]),
            f"{each['blocks']:,}",
            _cell(each["match"]),
            f"{goal:g} / {4 * goal:g}" if goal else "",
            _cell(each.get("exists")),
            _cell(each["memory"]),
        )
    console.print(table)
    console.print(
        f"publishing alone: {results['publish_alone_per_s']:,} blocks a second; "
        f"{results['bytes_a_block']} bytes a block"
    )


def _cell(figures: dict[str, float] | None) -> str:
    return f"{figures['p50_ms']:.3f} / {figures['p99_ms']:.3f}" if figures else ""


if __name__ == "__main__":
    typer.run(main)
