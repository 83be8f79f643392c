"""The publisher and a real Redis that is killed and started again at its address under events."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.store.client import connect
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tandem.prefix_index.redis import RedisIndex
from tests.chains import chain
from tests.harness.waiting import eventually

pytestmark = pytest.mark.service

QUICK = PublisherConfig(interval_s=0.002, heartbeat_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05)


class Workload:
    """Chains that grow at their end and shrink from it, as a cache that evicts leaf first does."""

    def __init__(self, publisher: Publisher, name: str) -> None:
        self._publisher = publisher
        self._random = random.Random(name)
        self.chains = [chain(f"{name}{i}", 60) for i in range(20)]
        self.lengths = [0] * 20

    async def run(self, num_events: int) -> None:
        for _ in range(num_events):
            which = self._random.randrange(20)
            blocks = self.chains[which]
            length = self.lengths[which]
            target = self._random.randrange(61)
            self._publisher.add(blocks[length:target], blocks[target:length][::-1])
            self.lengths[which] = target
            await asyncio.sleep(0.001)


async def test_the_tree_equals_what_is_held_after_redis_was_killed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connect(server.url) as redis:
            index = RedisIndex(redis, "c")
            publishers = [Publisher(index, f"w{i}", "p", config=QUICK) for i in range(3)]
            workloads = [Workload(p, f"w{i}/") for i, p in enumerate(publishers)]
            for publisher in publishers:
                publisher.start()

            async def outages() -> None:
                for pause_s in (0.0, 0.1):
                    await asyncio.sleep(0.1)
                    server.kill()
                    await asyncio.sleep(pause_s)
                    await asyncio.to_thread(server.restart)

            await asyncio.gather(outages(), *(w.run(400) for w in workloads))
            assert all(int(p.epoch.split(":")[1]) >= 2 for p in publishers)
            await eventually(lambda: all(p.in_step for p in publishers))
            for i, workload in enumerate(workloads):
                assert await index.num_blocks(f"w{i}") == sum(workload.lengths)
                for blocks, length in zip(workload.chains, workload.lengths, strict=True):
                    assert await index.match(blocks) == ({f"w{i}": length} if length else {})
            for publisher in publishers:
                await publisher.aclose()
            assert await index.match(workloads[0].chains[0]) == {}


async def test_an_idle_worker_comes_back_into_an_emptied_redis(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connect(server.url) as redis:
            index = RedisIndex(redis, "c")
            publisher = Publisher(index, "w", "p", config=QUICK)
            publisher.start()
            blocks = chain("a", 3000)
            publisher.add(blocks, [])
            await eventually(lambda: publisher.in_step)
            epoch = publisher.epoch
            await asyncio.to_thread(server.restart)
            await eventually(lambda: publisher.epoch != epoch and publisher.in_step)
            assert await index.match(blocks) == {"w": 3000}
            await publisher.aclose()
