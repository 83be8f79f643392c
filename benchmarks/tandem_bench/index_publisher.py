"""The publishing worker of `tandem bench index`, in a process of its own.

`python -m tandem_bench.index_publisher URL CLUSTER_ID RATE` stores chains of random blocks and,
once it holds a hundred thousand, removes as many as it stores, RATE changes a second in all, until
its standard input closes; then it prints the rate it reached.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque

from tandem.net.store.client import connect
from tandem.prefix_index.publisher import PublisherConfig
from tandem.prefix_index.redis import RedisIndex

BATCH_BLOCKS = PublisherConfig().batch_blocks
READY = "ready"
SILENT_S = 86_400  # the bench's workers publish once and send no heartbeats
_HELD_MAX = 100_000


def random_chain(rng: random.Random, length: int) -> list[bytes]:
    """Block hashes as a chain has them: 16 bytes each, without a pattern."""
    data = rng.randbytes(16 * length)
    return [data[at : at + 16] for at in range(0, len(data), 16)]


async def run(url: str, cluster_id: str, rate: int) -> float:
    """Blocks a second that were published."""
    redis = connect(url)
    index = RedisIndex(redis, cluster_id, silent_s=SILENT_S)
    await index.reset("publisher", "bench:1")
    print(READY, flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    rng, held = random.Random("publisher"), deque[bytes]()
    number = published = 0
    began = time.monotonic()
    while not ended.done():
        full = len(held) >= _HELD_MAX
        stored = random_chain(rng, BATCH_BLOCKS // 2 if full else BATCH_BLOCKS)
        removed = [held.popleft() for _ in range(BATCH_BLOCKS // 2)] if full else []
        held.extend(stored)
        assert await index.publish("publisher", "bench:1", number, stored, removed)
        number += 1
        published += len(stored) + len(removed)
        await asyncio.sleep(max(0.0, began + published / rate - time.monotonic()))
    rate_reached = published / (time.monotonic() - began)
    await redis.aclose()
    return rate_reached


if __name__ == "__main__":
    print(round(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))), flush=True)
