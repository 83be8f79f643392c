"""The workers of `tandem bench index --recovery`, in a process of their own.

`python -m tandem_bench.index_workers URL CLUSTER_ID WORKERS BLOCKS` publishes BLOCKS blocks for
each worker as a real worker does, until its standard input closes.
"""

from __future__ import annotations

import asyncio
import random
import sys

from tandem.net.store.client import connect
from tandem.prefix_index.publisher import Publisher
from tandem.prefix_index.redis import RedisIndex
from tandem_bench.index_publisher import READY, random_chain

CHAIN_BLOCKS = 1024


def chains_of(worker: int, blocks: int) -> list[list[bytes]]:
    """Returns the chains that a worker holds, the same ones in each process."""
    rng = random.Random(f"chains of worker {worker}")
    return [random_chain(rng, CHAIN_BLOCKS) for _ in range(blocks // CHAIN_BLOCKS)]


async def run(url: str, cluster_id: str, workers: int, blocks: int) -> None:
    redis = connect(url)
    publishers = [
        Publisher(RedisIndex(redis, cluster_id), f"worker-{worker}", f"process-{worker}")
        for worker in range(workers)
    ]
    for worker, publisher in enumerate(publishers):
        for chain in chains_of(worker, blocks):
            publisher.add(chain, [])
        publisher.start()
    while not all(publisher.in_step for publisher in publishers):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    print(READY, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(publisher.aclose() for publisher in publishers))
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
