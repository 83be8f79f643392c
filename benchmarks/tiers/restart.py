"""This benchmark measures how soon a worker that starts again has its disk tier in the prefix tree.

    python -m benchmarks.tiers.restart [--blocks 50000] [--chain 200] [--rounds 3]

Blocks of 4 KiB are written to a folder, in chains. Then, as a worker does when it starts, the
folder is opened, the slots are restored from its manifest, and a publisher brings them to the tree
in a Redis of this machine. The restart is over when the tree has all blocks. Writes
benchmarks/results/tier_restart.json.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.disk.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.seal import Plain
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.storage import Entry
from tandem.engine.tiers.tier import Tier
from tandem.net.store.client import connect
from tandem.prefix_index.holders import holder_of
from tandem.prefix_index.publisher import Publisher
from tandem.prefix_index.redis import RedisIndex
from tandem_bench.framework import RESULTS, Report, medians, options, run_main

BLOCK_BYTES = 4096
BLOCK_SIZE = 16
LAYOUT = KvLayout.of_one(BlockLayout(1, 1, 1, BLOCK_SIZE, BLOCK_BYTES // 2 // BLOCK_SIZE, "int8"))
DEADLINE_S = 120.0  # for the tree to have all blocks
HOLDER = holder_of("decode-0", "disk")


def storage(folder: Path, num_blocks: int) -> DiskStorage:
    size = HEADER_BYTES + num_blocks * (BLOCK_BYTES + RECORD_BYTES)
    return DiskStorage(
        folder, bytes_max=size, block_bytes=BLOCK_BYTES, identity="benchmark", seal=Plain()
    )


def fill(folder: Path, num_blocks: int, chain: int) -> None:
    disk, data, parent = storage(folder, num_blocks), np.zeros(BLOCK_BYTES, np.uint8), b""
    for number in range(num_blocks):
        parent = b"" if number % chain == 0 else parent
        block_hash = blake2b(str(number).encode(), digest_size=16).digest()
        disk.write(number, Entry(block_hash, parent), data)
        parent = block_hash
    disk.close()


async def restart(folder: Path, num_blocks: int, index: RedisIndex, epoch: str) -> dict[str, float]:
    started = time.perf_counter()
    disk = storage(folder, num_blocks)
    stored = [
        s.block_hash
        for s in Tier(0, [disk], keep_policy("lru", num_blocks, BLOCK_SIZE), LAYOUT)
        .take_events()
        .stored
    ]
    restored = time.perf_counter()
    publisher = Publisher(index, HOLDER, epoch)
    publisher.add(stored, [])
    publisher.start()
    async with asyncio.timeout(DEADLINE_S):
        while not publisher.in_step:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    ended = time.perf_counter()
    assert await index.num_blocks(HOLDER) == num_blocks
    await publisher.aclose()
    while await index.sweep(1 << 16):
        pass
    disk.close()
    return {"restore_s": restored - started, "publish_s": ended - restored}


async def measure(args: Options) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"writing {args.blocks} blocks", flush=True)
        fill(folder / "kv", args.blocks, args.chain)
        with EmbeddedRedis(folder / "redis") as server:
            async with connect(server.url) as redis:
                index = RedisIndex(redis, "benchmark")
                rounds = []
                for number in range(args.rounds):
                    rounds.append(await restart(folder / "kv", args.blocks, index, str(number)))
                    print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", flush=True)
                return rounds


@options
class Options:
    blocks: int = 50_000
    chain: int = 200
    """Blocks of a chain."""
    rounds: int = 3
    output: Path = RESULTS / "tier_restart.json"


def main(args: Options = Options()) -> None:
    report = Report(args.output)
    rounds = asyncio.run(measure(args))
    median = medians(rounds)
    median["total_s"] = sum(median.values())
    report.write(num_blocks=args.blocks, chain=args.chain, rounds=rounds, median=median)
    print(json.dumps(median))


if __name__ == "__main__":
    run_main(main)
