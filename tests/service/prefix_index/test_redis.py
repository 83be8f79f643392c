"""The parts that only the tree in Redis has: slots, shards, sweeping, scripts, memory, several
clients."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tandem.net.store.client import connect
from tandem.prefix_index.redis import RedisIndex
from tests.chains import chain

pytestmark = pytest.mark.service


@pytest.fixture
def index(redis_client: Redis, cluster_id: str) -> RedisIndex:
    return RedisIndex(redis_client, cluster_id)


async def state(redis: Redis, cluster_id: str, shard: int = 0) -> dict[bytes, bytes]:
    return dict(await redis.hgetall(f"{{tandem:{cluster_id}:{shard}}}:prefix"))  # type: ignore[misc]


async def entries(redis: Redis, cluster_id: str) -> dict[bytes, int]:
    found = {}
    async for key in redis.scan_iter(f"{{tandem:{cluster_id}:0}}:prefix:b:*", count=1000):
        found.update({f: int(m) for f, m in (await redis.hgetall(key)).items()})  # type: ignore[misc]
    return found


async def sweep_all(index: RedisIndex) -> None:
    async with asyncio.timeout(10.0):
        while await index.sweep(20_000):
            pass


async def test_a_dropped_slot_is_reused_only_after_its_bits_are_swept(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 20)
    for epoch in ("1", "2"):
        await index.reset("w", epoch)
        assert await index.publish("w", epoch, 0, blocks, [])
        assert (await state(redis_client, cluster_id))[b"slot:w"] == (
            b"0" if epoch == "1" else b"1"
        )
    assert set((await entries(redis_client, cluster_id)).values()) == {0b11}

    await sweep_all(index)
    assert set((await entries(redis_client, cluster_id)).values()) == {0b10}
    await index.reset("x", "1")
    assert (await state(redis_client, cluster_id))[b"slot:x"] == b"0"
    assert await index.match(blocks) == {"w": 20}


async def test_the_sweep_covers_the_first_and_the_last_bucket(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = [bytes([high]) * 2 + bytes(14) for high in (0, 255)]
    await index.reset("w", "1")
    assert await index.publish("w", "1", 0, blocks, [])
    assert len(await entries(redis_client, cluster_id)) == 1  # the fields are equal
    await index.forget("w")
    await sweep_all(index)
    assert await entries(redis_client, cluster_id) == {}


async def test_a_client_learns_of_further_shards_by_looking_up(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 3)
    for i in range(70):
        await index.reset(f"w{i}", "1")
        assert await index.publish(f"w{i}", "1", 0, blocks, [])
    fresh = RedisIndex(redis_client, cluster_id)
    assert [len(await fresh.match(blocks)) for _ in range(4)] == [31, 62, 70, 70]


async def test_a_first_burst_opens_no_connection_and_misses_no_shard(
    index: RedisIndex, redis_url: str, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 3)
    for i in range(70):
        await index.reset(f"w{i}", "1")
        assert await index.publish(f"w{i}", "1", 0, blocks, [])
    await redis_client.script_flush()
    async with connect(redis_url) as fresh:
        reader = RedisIndex(fresh, cluster_id)
        await reader.open()
        before = (await redis_client.info("stats"))["total_connections_received"]
        found = await asyncio.gather(*(reader.match(blocks) for _ in range(200)))
        assert (await redis_client.info("stats"))["total_connections_received"] == before
        assert {len(each) for each in found} == {70}


async def test_a_slot_dropped_while_a_round_is_under_way_waits_for_the_next_round(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 200)
    for worker_id in ("w", "x"):
        await index.reset(worker_id, "1")
        assert await index.publish(worker_id, "1", 0, blocks, [])
    await index.forget("w")
    assert await index.sweep(30_000)
    await index.forget("x")
    await index.reset("z", "1")
    assert (await state(redis_client, cluster_id))[b"slot:z"] == b"2"
    while (await state(redis_client, cluster_id))[b"sweeping"] == b"1":
        assert await index.sweep(30_000)
    await index.reset("y", "1")
    assert (await state(redis_client, cluster_id))[b"slot:y"] == b"0"
    assert await index.match(blocks) == {}
    await sweep_all(index)
    assert await entries(redis_client, cluster_id) == {}


async def test_a_slot_that_never_held_a_block_is_clean_at_once(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    for epoch in range(50):
        await index.reset("w", str(epoch))
    assert (await state(redis_client, cluster_id))[b"slot:w"] == b"0"
    assert not await index.sweep(1)


async def test_a_full_shard_takes_the_slots_of_silent_workers(
    redis_client: Redis, cluster_id: str
) -> None:
    index = RedisIndex(redis_client, cluster_id, silent_s=60)
    for i in range(31):
        await index.reset(f"w{i}", "1")
    key = f"{{tandem:{cluster_id}:0}}:prefix"
    seen = int(await redis_client.hget(key, "seen:7"))  # type: ignore[misc,arg-type]
    await redis_client.hset(key, "seen:7", seen - 61)  # type: ignore[misc]
    await index.reset("new", "1")
    after = await state(redis_client, cluster_id)
    assert after[b"slot:new"] == b"7"
    assert b"slot:w7" not in after
    assert not await index.publish("w7", "1", 0, chain("a", 1), [])
    assert b"next" not in after


async def test_publishing_keeps_a_slot(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    await index.reset("w", "1")
    key = f"{{tandem:{cluster_id}:0}}:prefix"
    await redis_client.hset(key, "seen:0", 5)  # type: ignore[misc]
    assert await index.publish("w", "1", 0, [], [])
    assert int((await state(redis_client, cluster_id))[b"seen:0"]) > 5


async def test_a_worker_has_one_slot_in_one_shard(redis_client: Redis, cluster_id: str) -> None:
    index = RedisIndex(redis_client, cluster_id)
    blocks = chain("a", 3)
    for i in range(40):
        await index.reset(f"w{i}", "1")
        assert await index.publish(f"w{i}", "1", 0, blocks, [])
    assert b"slot:w39" in await state(redis_client, cluster_id, 1)
    await index.forget("w0")
    await sweep_all(index)
    await RedisIndex(redis_client, cluster_id).reset("w39", "2")
    assert b"slot:w39" in await state(redis_client, cluster_id, 0)
    assert b"slot:w39" not in await state(redis_client, cluster_id, 1)
    assert await index.match(blocks) == {f"w{i}": 3 for i in range(1, 39)}


async def test_clients_share_one_tree(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    other = RedisIndex(redis_client, cluster_id)
    stranger = RedisIndex(redis_client, cluster_id + "-other")
    blocks = chain("a", 5)
    await index.reset("w", "1")
    assert await other.publish("w", "1", 0, blocks, [])
    assert await other.match(blocks) == {"w": 5}
    assert await stranger.match(blocks) == {}
    await other.forget("w")
    assert not await index.publish("w", "1", 1, [], [])


async def test_a_server_that_lost_its_scripts_gets_them_again(
    index: RedisIndex, redis_client: Redis
) -> None:
    blocks = chain("a", 5)
    await index.reset("w", "1")
    await redis_client.script_flush()
    assert await index.publish("w", "1", 0, blocks, [])
    await redis_client.script_flush()
    assert await index.match(blocks) == {"w": 5}
    for i in range(31):
        await index.reset(f"w{i}", "1")
        assert await index.publish(f"w{i}", "1", 0, blocks[:1], [])
    await redis_client.script_flush()
    assert await index.match(blocks) == {f"w{i}": 1 for i in range(31)} | {"w": 5}


async def test_all_keys_of_a_shard_share_a_hash_slot_and_stay_compact(
    index: RedisIndex, redis_client: Redis, cluster_id: str
) -> None:
    await index.reset("w", "1")
    assert await index.publish("w", "1", 0, chain("a", 2000), [])
    keys = [k async for k in redis_client.scan_iter(f"*{cluster_id}*", count=5000)]
    assert {k.partition(b"}")[0] for k in keys} == {f"{{tandem:{cluster_id}:0".encode()}
    buckets = [k for k in keys if b":prefix:b:" in k]
    assert len(buckets) > 1900
    encodings = {await redis_client.object("ENCODING", k) for k in buckets[:20]}
    assert encodings <= {b"listpack", b"ziplist"}  # as servers before 7.0 call it


async def test_a_cancelled_look_up_leaves_the_connection_usable(
    index: RedisIndex, redis_client: Redis
) -> None:
    blocks = chain("a", 50)
    await index.reset("w", "1")
    assert await index.publish("w", "1", 0, blocks, [])
    for steps in range(12):
        task = asyncio.create_task(index.match(blocks[: steps + 1]))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await index.match(blocks) == {"w": 50}
