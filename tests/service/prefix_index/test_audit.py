"""The audit of a worker's entries in the tree: exact, even while the worker publishes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from redis.asyncio import Redis

from tandem.common.process.cancellation import cancel
from tandem.prefix_index.audit import Differences, Held, TreeInspector
from tandem.prefix_index.entries import ENTRY_BYTES, bucket_start
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tandem.prefix_index.redis import RedisIndex
from tests.chains import chain

pytestmark = pytest.mark.service
QUICK = PublisherConfig(interval_s=0.002, heartbeat_s=0.05)


def holding(hashes: set[bytes]) -> Held:
    async def held(first: int, end: int) -> set[bytes]:
        low, high = bucket_start(first), bucket_start(end)
        return {h[:ENTRY_BYTES] for h in hashes if low <= h and (not high or h < high)}

    return held


@pytest.fixture
def index(redis_client: Redis, cluster_id: str) -> RedisIndex:
    return RedisIndex(redis_client, cluster_id)


@pytest.fixture
def tree(redis_client: Redis, index: RedisIndex) -> TreeInspector:
    return TreeInspector(redis_client, index, looks=2, pause_s=0.0)


def bucket_key(cluster_id: str, block_hash: bytes) -> bytes:
    return f"{{tandem:{cluster_id}:0}}:prefix:b:".encode() + block_hash[:2]


async def test_every_entry_that_differs_is_counted_and_no_other(
    index: RedisIndex, tree: TreeInspector, redis_client: Redis, cluster_id: str
) -> None:
    blocks, others = chain("a", 3000), chain("b", 500)
    # The ends of the range of buckets, too.
    blocks += [bytes(16), b"\xff" * 16, b"\xff\xff" + bytes(14)]
    for worker_id, held in (("w", blocks), ("x", blocks[:100] + others)):
        await index.reset(worker_id, "1")
        assert await index.publish(worker_id, "1", 0, held, [])
    truth = set(blocks)
    assert await tree.audit("w", holding(truth)) == Differences(3003)
    assert await tree.audit("x", holding({*blocks[:100], *others})) == Differences(600)

    for block_hash in (*blocks[7:10], bytes(16)):  # the tree lost these
        await redis_client.hdel(bucket_key(cluster_id, block_hash), block_hash[2:10])  # type: ignore[misc,arg-type]
    truth -= {blocks[50], b"\xff" * 16}  # and the worker those
    truth |= set(chain("c", 3))
    found = await tree.audit("w", holding(truth))
    assert found == Differences(3006, missing=7, stale=2)
    assert found.any
    found = await tree.audit("w", holding(truth), sample=200_000)
    assert found == Differences(3006, missing=7, stale=2)


async def test_a_sample_is_bounded_and_goes_around(index: RedisIndex, tree: TreeInspector) -> None:
    blocks = chain("a", 20_000)
    await index.reset("w", "1")
    assert await index.publish("w", "1", 0, blocks, [])
    truth = set(blocks[::2])
    checked = []
    for _ in range(8):
        found = await tree.audit("w", holding(truth), sample=8000)
        checked.append(found.num_checked)
        assert found.missing == 0
        assert 0.35 * found.num_checked < found.stale < 0.65 * found.num_checked
    # An entry costs one and its bucket another, so this many of 85,536 were looked at.
    assert all(1200 < number < 2700 for number in checked)
    assert len(set(checked)) > 1


async def test_a_worker_without_a_log_is_said_to_have_none(
    index: RedisIndex, tree: TreeInspector
) -> None:
    found = await tree.audit("w", holding(set()))
    assert found == Differences(in_tree=False)
    assert found.any
    await index.reset("w", "1")
    assert await tree.audit("w", holding(set())) == Differences()


async def test_what_is_being_published_is_no_difference(
    index: RedisIndex, tree: TreeInspector
) -> None:
    publisher = Publisher(index, "w", "p", config=QUICK)
    publisher.start()
    truth: set[bytes] = set()
    rng = random.Random("churn")
    waiting = [chain(f"{n}", 40) for n in range(200)]
    held: list[list[bytes]] = []

    async def churn() -> None:
        while True:
            if len(held) < 100:
                held.append(taken := waiting.pop(rng.randrange(len(waiting))))
                truth.update(taken)
                publisher.add(taken, [])
            else:
                waiting.append(gone := held.pop(rng.randrange(len(held))))
                truth.difference_update(gone)
                publisher.add([], gone[::-1])
            await asyncio.sleep(0.01)

    task = asyncio.create_task(churn())
    while len(held) < 50:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    tree.looks = 6
    tree.pause_s = 0.1
    found = await tree.audit("w", holding(truth))
    tree.looks = 2
    tree.pause_s = 0.0
    assert not found.any
    assert found.num_checked > 500
    # A publisher that ended without a word is found out.
    assert publisher._task is not None
    await cancel(publisher._task)
    before = set(truth)
    while len(before - truth) < 80 or len(truth - before) < 80:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    found = await tree.audit("w", holding(truth))
    assert found.missing
    assert found.stale
    await cancel(task)


async def test_a_block_that_comes_back_after_each_look_at_the_tree_is_no_difference(
    index: RedisIndex, tree: TreeInspector
) -> None:
    """It is evicted and published as such, then the tree is read, and then it is held again."""
    blocks = chain("a", 100)
    await index.reset("w", "1")
    assert await index.publish("w", "1", 0, blocks[:99], [])
    asked: Counter[int] = Counter()

    async def held(first: int, end: int) -> set[bytes]:
        asked[first] += 1  # before and after each look at a range, but only after the first
        return await holding(set(blocks[: 99 + asked[first] % 2]))(first, end)

    assert await tree.audit("w", held) == Differences(100)
    assert max(asked.values()) == 3


async def test_a_log_that_begins_between_two_looks_is_looked_at_from_then_on(
    index: RedisIndex, tree: TreeInspector
) -> None:
    """The tree was lost. Before the worker publishes anew, all that it holds is missing."""
    blocks = chain("a", 100)
    truth = set(blocks)
    num_asked = 0

    async def held(first: int, end: int) -> set[bytes]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # after the first look; a block is on its way
            await index.reset("w", "1")
            assert await index.publish("w", "1", 0, blocks[:99], [])
        if num_asked == 3:
            assert await index.publish("w", "1", 1, blocks[99:], [])
        return await holding(truth)(first, end)

    assert await tree.audit("w", held) == Differences(100)


async def test_stats_count_entries_workers_bytes_and_what_was_swept(
    index: RedisIndex, tree: TreeInspector, redis_client: Redis, cluster_id: str
) -> None:
    assert await tree.stats() == await tree.stats()
    for i in range(33):
        await index.reset(f"w{i}", "1")
    blocks = chain("a", 20_000)
    assert await index.publish("w0", "1", 0, blocks, [])
    assert await index.publish("w1", "1", 0, blocks[:500], blocks[400:500])
    assert await index.publish("w32", "1", 0, blocks[:70], [])
    await redis_client.hincrby(f"{{tandem:{cluster_id}:0}}:prefix", "seen:0", -9)  # type: ignore[misc]
    stats = await tree.stats()
    assert stats.num_entries == 20_070
    assert stats.num_swept == 0
    assert stats.workers["w0"].num_blocks == 20_000
    assert 9 <= stats.workers["w0"].silent_s < 60
    assert stats.workers["w1"].num_blocks == 400
    assert len(stats.workers) == 33
    assert 15 < stats.num_bytes / 20_070 < 300  # sparse buckets: mostly keys

    await index.forget("w0")
    await index.forget("w1")
    while await index.sweep(20_000):
        pass
    stats = await tree.stats()
    assert (stats.num_entries, stats.num_swept, len(stats.workers)) == (70, 20_000, 31)


async def test_a_worker_that_fell_silent_is_swept(
    redis_client: Redis, cluster_id: str, tree: TreeInspector
) -> None:
    index = RedisIndex(redis_client, cluster_id, silent_s=60)
    for worker_id in ("dead", "alive"):
        await index.reset(worker_id, "1")
        assert await index.publish(worker_id, "1", 0, chain("a", 10), [])
    await redis_client.hincrby(f"{{tandem:{cluster_id}:0}}:prefix", "seen:0", -61)  # type: ignore[misc]
    while await index.sweep(20_000):
        pass
    assert await index.match(chain("a", 10)) == {"alive": 10}
    stats = await tree.stats()
    assert (stats.num_entries, stats.num_swept, set(stats.workers)) == (10, 10, {"alive"})
