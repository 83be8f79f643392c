"""The trees that `tandem bench index` measures: the same chains in Redis and in its rivals."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.net.store.client import Client
from tandem.prefix_index.memory import MemoryIndex
from tandem.prefix_index.protocol import PrefixIndex
from tandem.prefix_index.redis import RedisIndex
from tandem.prefix_index.replica import Replica
from tandem_bench.index_publisher import BATCH_BLOCKS, random_chain
from tandem_bench.radix_tree import RadixTree

CHAIN_BLOCKS = 8192
EXISTS_KEYS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Trees:
    """The ways that are compared, filled alike."""

    redis: Client
    index: RedisIndex
    replica: Replica
    memory: MemoryIndex
    radix: RadixTree

    async def look_up(self, asked: Sequence[bytes]) -> dict[str, int] | None:
        """Looks up in the replica, after the event loop has done what is ready."""
        await asyncio.sleep(0)
        return self.replica.match(asked, closed=True)


async def fill(redis: Client, index: RedisIndex, blocks: int) -> dict[str, float]:
    """One worker publishes everything, alone: blocks a second, and bytes a block."""
    await index.reset("holder", "bench:1")
    before = (await redis.info("memory"))["used_memory"]
    number, took_s = 0, 0.0
    for chain in bulk(blocks):
        began = time.perf_counter()
        number = await publish(index, "holder", chain, number)
        took_s += time.perf_counter() - began
    used = (await redis.info("memory"))["used_memory"] - before
    return {"publish_alone_per_s": round(blocks / took_s), "bytes_a_block": round(used / blocks, 1)}


async def fill_others(trees: Trees, blocks: int) -> None:
    """The same chains, for each way of keeping them."""
    await trees.memory.reset("holder", "bench:1")
    number = num_keys = 0
    for chain in bulk(blocks):
        number = await publish(trees.memory, "holder", chain, number)
        trees.radix.store("holder", chain)
        if num_keys < EXISTS_KEYS_MAX:
            await set_keys(trees.redis, chain)
            num_keys += len(chain)


def bulk(blocks: int) -> Iterator[list[bytes]]:
    """The same chains each time."""
    rng = random.Random("bulk")
    for start in range(0, blocks, CHAIN_BLOCKS):
        yield random_chain(rng, min(CHAIN_BLOCKS, blocks - start))


async def set_keys(redis: Client, chain: list[bytes]) -> None:
    await redis.mset({b"exists:" + block_hash: b"" for block_hash in chain})


async def hold(trees: Trees, holders: int, count: int) -> list[list[bytes]]:
    """`count` whole chains that `holders` workers have."""
    rng = random.Random(f"chains of {holders}")
    chains = [random_chain(rng, CHAIN_BLOCKS) for _ in range(count)]
    for worker in range(holders):
        worker_id, number = f"worker-{holders}-{worker}", 0
        for each in (trees.index, trees.memory):
            await each.reset(worker_id, "bench:1")
            number = 0
            for chain in chains:
                number = await publish(each, worker_id, chain, number)
        for chain in chains:
            trees.radix.store(worker_id, chain)
    if holders == 1:
        for chain in chains:
            await set_keys(trees.redis, chain)
    return chains


async def publish(index: PrefixIndex, worker_id: str, chain: list[bytes], number: int) -> int:
    """The chain in batches as workers send them; answers the next sequence number."""
    for start in range(0, len(chain), BATCH_BLOCKS):
        batch = chain[start : start + BATCH_BLOCKS]
        if not await index.publish(worker_id, "bench:1", number, batch, []):
            raise ConfigError(f"the tree refused batch {number} of {worker_id}")
        number += 1
    return number


async def exists(redis: Client, asked: Sequence[bytes]) -> int:
    async with redis.pipeline(transaction=False) as pipe:
        for block_hash in asked:
            pipe.exists(b"exists:" + block_hash)
        replies = await pipe.execute()
    return replies.index(0) if 0 in replies else len(replies)
