"""`tandem bench index --recovery`: how soon look-ups hit again after Redis or a router is lost.

Workers in another process hold chains of 1,024 blocks and publish them. This process looks up
prefixes of 512 blocks as a router does: in its replica, or in Redis within the router's deadline
while the replica is not ready. The hit rate is the share of the blocks that a look-up finds at the
worker that holds them. It is measured each 100 ms.

Redis is killed and started again, empty. Then the router is lost: a new one begins without a
replica.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.router import RouterOptions
from tandem.common.process.cancellation import cancel
from tandem.common.process.progress import ProgressRow
from tandem.errors import ConfigError
from tandem.net.store.client import UNREACHABLE, connect
from tandem.prefix_index.replica import Replica
from tandem.prefix_index.replicated import ReplicatedIndex
from tandem_bench.index_publisher import READY
from tandem_bench.index_workers import CHAIN_BLOCKS, chains_of

CLUSTER_ID = "bench"
WORKERS = 8
ASKED_BLOCKS = 512
ASKED_EACH_TIME = 10
EVERY_S = 0.1
OBSERVED_S = 20.0  # time after each loss
RECOVERED = 0.95  # share of the hit rate before the loss
GOAL_S = 10.0
REPLICA_BYTES_MAX = 4 << 30
LOOKUP_DEADLINE_S: Any = RouterOptions.__dataclass_fields__["lookup_deadline_s"].default


async def measure_recovery(
    server: EmbeddedRedis, blocks: int, tell: Callable[[ProgressRow], None]
) -> dict[str, Any]:
    """Returns the seconds after which hits were back, and the rates."""
    each = blocks // WORKERS
    chains = [chains_of(worker, each) for worker in range(WORKERS)]
    if not all(chains):
        raise ConfigError(f"--blocks must be at least {WORKERS * CHAIN_BLOCKS} with --recovery")
    tell(ProgressRow("workers", f"{blocks:,} blocks are published"))
    workers = await asyncio.to_thread(start_workers, server.url, each)
    results: dict[str, Any] = {"blocks": blocks, "workers": WORKERS, "goal_s": GOAL_S}
    try:
        async with router(server.url) as index:
            while not index.replica.is_usable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            before = [await hit_rate(index, chains) for _ in range(10)]
            results["before"] = round(sum(before) / len(before), 3)
            tell(ProgressRow("redis", "Redis is killed and started again"))
            restarting = asyncio.create_task(asyncio.to_thread(server.restart))
            results["redis"] = await observe(index, chains, results["before"])
            await restarting
        tell(ProgressRow("router", "a new router begins"))
        async with router(server.url) as index:
            results["router"] = await observe(index, chains, results["before"])
    finally:
        workers.stdin.close()  # type: ignore[union-attr]
        workers.wait(30)
    return results


def start_workers(url: str, blocks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tandem_bench.index_workers", url, CLUSTER_ID]
    process = subprocess.Popen(
        [*command, str(WORKERS), str(blocks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != READY:
        raise ConfigError("the bench's workers did not come up")
    return process


@asynccontextmanager
async def router(url: str) -> AsyncIterator[ReplicatedIndex]:
    async with connect(url) as redis, connect(url) as waiting:
        replica = Replica(waiting, CLUSTER_ID, bytes_max=REPLICA_BYTES_MAX)
        following = asyncio.create_task(replica.run())
        try:
            yield ReplicatedIndex(redis, CLUSTER_ID, replica)
        finally:
            await cancel(following)


async def observe(
    index: ReplicatedIndex, chains: list[list[list[bytes]]], before: float
) -> dict[str, Any]:
    """Measures hit rates after a loss. The first one is at 0 s."""
    began = time.monotonic()
    rates: list[tuple[float, float]] = []
    while (at_s := time.monotonic() - began) < OBSERVED_S:
        rates.append((round(at_s, 2), round(await hit_rate(index, chains), 3)))
        await asyncio.sleep(EVERY_S)
    lower = [at_s for at_s, rate in rates if rate < RECOVERED * before]
    return {
        "back_after_s": round(max(lower, default=0.0), 2),
        "lowest": min(rate for _, rate in rates),
        "rates": rates,
        "asked_redis": index.num_asked,
        "answered_by_replica": index.num_local,
        "loads": index.replica.num_loads,
    }


async def hit_rate(index: ReplicatedIndex, chains: list[list[list[bytes]]]) -> float:
    found = 0
    for _ in range(ASKED_EACH_TIME):
        worker = random.randrange(len(chains))
        chain = random.choice(chains[worker])[:ASKED_BLOCKS]
        try:
            async with asyncio.timeout(LOOKUP_DEADLINE_S):
                found += (await index.match(chain)).get(f"worker-{worker}", 0)
        except UNREACHABLE:
            pass
    return found / (ASKED_EACH_TIME * ASKED_BLOCKS)


def show_recovery(results: dict[str, Any], console: Console) -> None:
    console.print(f"{results['blocks']:,} blocks; hit rate before a loss {results['before']:.1%}")
    for lost in ("redis", "router"):
        told = results[lost]
        console.print(
            f"after the loss of the {lost}: 95% of it is back after {told['back_after_s']} s "
            f"(goal {GOAL_S:g}), lowest {told['lowest']:.1%}; {told['answered_by_replica']:,} "
            f"look-ups in the replica, {told['asked_redis']:,} in Redis"
        )
