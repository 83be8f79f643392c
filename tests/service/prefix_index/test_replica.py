"""A router's replica of the prefix tree when Redis, the log, a worker or another version fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.store.client import UNREACHABLE, Client, connect
from tandem.net.store.script import Script
from tandem.prefix_index import redis as tree
from tandem.prefix_index import replica as replicas
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tandem.prefix_index.redis import RedisIndex, lua_script, shard_key
from tandem.prefix_index.shard_replica import OLD_S, Scan
from tests.chains import chain
from tests.harness.followed_index import FollowedIndex, SteppedShard, followed
from tests.harness.waiting import eventually

pytestmark = pytest.mark.service

QUICK = PublisherConfig(interval_s=0.002, heartbeat_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05)


@pytest.fixture
async def index(redis_client: Redis, cluster_id: str) -> AsyncIterator[FollowedIndex]:
    async with followed(redis_client, cluster_id) as index:
        await index.catch_up()
        yield index


@asynccontextmanager
async def publishing(
    redis: Client, cluster_id: str, worker_id: str, blocks: list[bytes], process: str = "p"
) -> AsyncIterator[Publisher]:
    publisher = Publisher(RedisIndex(redis, cluster_id), worker_id, process, config=QUICK)
    publisher.add(blocks, [])
    publisher.start()
    await eventually(lambda: publisher.in_step)
    yield publisher
    await publisher.aclose()


class OlderIndex(RedisIndex):
    """The tree as a process uses it whose version writes no log."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        super().__init__(redis, cluster_id)
        no_log = "local LOG_S = 20 local function append() end "

        def script(*names: str) -> Script:
            text = no_log + "".join((tree._LUA / f"{name}.lua").read_text() for name in names)
            return Script(text.replace("'logged:' .. slot, epoch,", ""))

        self._publish = script("publish")
        self._reset = script("drop", "reset")
        self._sweep = script("drop", "sweep")


async def test_look_ups_hit_while_redis_is_killed_and_until_all_is_published_again(
    tmp_path: Path,
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with (
            connect(server.url) as redis,
            connect(server.url) as waiting,
            followed(waiting, "c") as index,
            publishing(redis, "c", "w", blocks := chain("a", 3000)) as publisher,
        ):
            assert await index.match(blocks) == {"w": 3000}
            server.kill()
            publisher.add([], blocks[:1999:-1])
            assert index.replica.match(blocks, closed=True) == {"w": 3000}
            restarting = asyncio.create_task(asyncio.to_thread(server.restart))
            while not restarting.done() or not publisher.in_step or publisher.num_logs < 2:
                found = index.replica.match(blocks, closed=True)
                assert found is not None
                assert found["w"] in (2000, 3000)
                await asyncio.sleep(0)
            assert await index.match(blocks) == {"w": 2000}
            (shard,) = index.replica.shards
            await eventually(lambda: [g.epoch for g in shard._slots.values()] == [publisher.epoch])


async def test_a_new_process_of_a_worker_ends_the_hits_of_the_one_before(
    redis_client: Redis, cluster_id: str, index: FollowedIndex
) -> None:
    blocks = chain("a", 10)
    async with publishing(redis_client, cluster_id, "w", blocks, "p"):
        assert await index.match(blocks) == {"w": 10}
        async with publishing(redis_client, cluster_id, "w", blocks[:2], "q"):
            assert await index.match(blocks) == {"w": 2}


async def test_an_old_log_counts_until_the_new_one_is_complete(index: FollowedIndex) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks, [], complete=True)
    await index.reset("w", "p:2")
    assert await index.match(blocks) == {"w": 10}
    assert await index.publish("w", "p:2", 0, blocks[:3], [])
    assert await index.match(blocks) == {"w": 10}
    assert await index.publish("w", "p:2", 1, blocks[3:6], [], complete=True)
    assert await index.match(blocks) == {"w": 6}


async def test_an_old_log_counts_for_a_limited_time(index: FollowedIndex) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks, [])
    await index.reset("w", "p:2")
    assert await index.match(blocks) == {"w": 10}
    (shard,) = index.replica.shards
    (old,) = [each for each in shard._slots.values() if each.epoch == "p:1"]
    shard.expire(old.old_until - 1)
    assert await index.match(blocks) == {"w": 10}
    shard.expire(old.old_until + OLD_S)
    assert await index.match(blocks) == {}


async def test_an_alarm_ends_all_logs_of_a_worker_at_once(index: FollowedIndex) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks, [])
    await index.reset("w", "p:2")
    assert await index.publish("w", "p:2", 0, blocks[:1], [])
    assert await index.match(blocks) == {"w": 10}
    await index.forget("w")
    assert index.replica.match(blocks, closed=True) == {}
    assert await index.match(blocks) == {}


async def test_a_forgotten_worker_does_not_count_even_if_redis_does_not_answer(
    tmp_path: Path,
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connect(server.url) as redis, followed(redis, "c") as index:
            blocks = chain("a", 10)
            await index.reset("w", "p:1")
            assert await index.publish("w", "p:1", 0, blocks, [])
            assert await index.match(blocks) == {"w": 10}
            server.kill()
            with pytest.raises(UNREACHABLE):
                await index.forget("w")
            assert index.replica.match(blocks, closed=True) == {}


async def test_a_new_router_asks_redis_until_its_replica_is_loaded(
    redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 9000)
    writer = RedisIndex(redis_client, cluster_id)
    await writer.reset("w", "p:1")
    assert await writer.publish("w", "p:1", 0, blocks, [])
    async with followed(redis_client, cluster_id) as index:
        assert index.replica.match(blocks, closed=True) is None
        assert await super(FollowedIndex, index).match(blocks) == {"w": 9000}
        assert (index.num_local, index.num_asked) == (0, 1)
        await index.catch_up()
        assert await super(FollowedIndex, index).match(blocks) == {"w": 9000}
        assert (index.num_local, index.num_asked) == (1, 1)


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_trimmed_log_is_noticed_and_the_tree_loaded_again(
    index: FollowedIndex, redis_client: Redis, cluster_id: str, *, is_last: bool
) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks[:4], [])
    assert await index.match(blocks) == {"w": 4}
    key = shard_key(cluster_id, 0)
    async with redis_client.pipeline(transaction=True) as pipe:
        script = lua_script("append", "publish")
        await script.load(redis_client)
        pipe.evalsha(script._digest, 1, key, "w", "p:1", 1, b"".join(blocks[4:7]), b"", 0)
        pipe.xtrim(f"{key}:log", maxlen=0, approximate=False)
        await pipe.execute()
    if not is_last:
        assert await index.publish("w", "p:1", 2, blocks[7:], [])
    assert await index.match(blocks) == {"w": 7 if is_last else 10}
    assert index.replica.num_loads == 2


async def test_a_worker_dropped_in_a_gap_of_the_log_does_not_count(
    index: FollowedIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks, [])
    assert await index.match(blocks) == {"w": 10}
    key = shard_key(cluster_id, 0)
    async with redis_client.pipeline(transaction=True) as pipe:
        script = lua_script("append", "drop", "reset")
        await script.load(redis_client)
        pipe.evalsha(script._digest, 1, key, "w", "", 60)
        pipe.xtrim(f"{key}:log", maxlen=0, approximate=False)
        await pipe.execute()
    assert await index.match(blocks) == {}


async def test_a_new_epoch_in_mid_scan(redis_client: Redis, cluster_id: str) -> None:
    writer, replica = RedisIndex(redis_client, cluster_id), SteppedShard(redis_client, cluster_id)
    blocks = chain("a", 400)
    for worker_id in ("w", "x"):
        await writer.reset(worker_id, "p:1")
        assert await writer.publish(worker_id, "p:1", 0, blocks, [])
    await replica.begin_load()
    await replica.scan()
    await writer.reset("w", "q:1")
    assert await writer.publish("w", "q:1", 0, blocks[:50], [])
    assert await writer.publish("x", "p:1", 1, [], blocks[:99:-1])
    await replica.scan()
    assert await writer.publish("w", "q:1", 1, blocks[50:70], blocks[49:39:-1])
    await replica.finish()
    assert replica.shard.match(blocks, closed=False) == {"w": 70, "x": 100}
    assert replica.shard.num_blocks("w") == 60


async def test_a_replica_that_differs_loads_the_worker_again(
    index: FollowedIndex, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain("a", 10)
    for worker_id in ("w", "x"):
        await index.reset(worker_id, "p:1")
        assert await index.publish(worker_id, "p:1", 0, blocks, [])
    assert await index.match(blocks) == {"w": 10, "x": 10}
    (shard,) = index.replica.shards
    (of_w,) = index.replica.generations("w")
    shard.table.remove(1 << of_w.slot, blocks[-1], 16)
    with caplog.at_level(logging.WARNING):
        await eventually(lambda: index.replica.num_loads == 2)
    assert await index.match(blocks) == {"w": 10, "x": 10}
    assert "differs from the tree in blocks of w," in caplog.text


async def test_workers_of_an_older_version_are_looked_up_in_redis(
    index: FollowedIndex, redis_client: Redis, cluster_id: str
) -> None:
    older = OlderIndex(redis_client, cluster_id)
    blocks = chain("a", 10)
    await index.reset("new", "p:1")
    assert await index.publish("new", "p:1", 0, blocks[:4], [])
    assert await index.match(blocks) == {"new": 4}
    await older.reset("old", "p:1")
    assert await older.publish("old", "p:1", 0, blocks, [])
    await eventually(lambda: index.replica.match(blocks, closed=True) is None)
    both = {"new": 4, "old": 10}
    assert await super(FollowedIndex, index).match(blocks) == both
    assert await older.match(blocks) == both
    await older.forget("old")
    assert await index.match(blocks) == {"new": 4}


async def test_what_an_older_router_drops_is_dropped_at_the_next_check(
    index: FollowedIndex, redis_client: Redis, cluster_id: str
) -> None:
    blocks = chain("a", 10)
    await index.reset("w", "p:1")
    assert await index.publish("w", "p:1", 0, blocks, [])
    assert await index.match(blocks) == {"w": 10}
    await OlderIndex(redis_client, cluster_id).forget("w")
    await eventually(lambda: index.replica.match(blocks, closed=True) == {})


async def test_a_worker_that_takes_the_slot_of_a_newer_version_is_looked_up_in_redis(
    index: FollowedIndex, redis_client: Redis, cluster_id: str
) -> None:
    older = OlderIndex(redis_client, cluster_id)
    await index.reset("w", "p:1")
    await older.reset("w", "q:1")
    blocks = chain("a", 10)
    assert await older.publish("w", "q:1", 0, blocks, [])
    await eventually(lambda: index.replica.match(blocks, closed=True) is None)
    assert await super(FollowedIndex, index).match(blocks) == {"w": 10}


async def test_without_the_right_to_write_the_log_redis_is_asked(tmp_path: Path) -> None:
    """ACL rules of an older version let workers publish, but not write the log."""
    with EmbeddedRedis(tmp_path, cluster_id="c") as server:
        async with (
            connect(server.url) as admin,
            connect(server.url_of("worker")) as of_worker,
            connect(server.url_of("router")) as of_router,
            followed(of_router, "c") as index,
        ):
            worker = RedisIndex(of_worker, "c")
            blocks = chain("a", 10)
            await worker.reset("w", "p:1")
            assert await worker.publish("w", "p:1", 0, blocks[:2], [])
            assert await index.match(blocks) == {"w": 2}
            await admin.execute_command("ACL", "SETUSER", "worker", "-xadd", "-xtrim")
            assert await worker.publish("w", "p:1", 1, blocks[2:4], [])
            await worker.sweep(10)
            await eventually(lambda: index.replica.match(blocks, closed=True) is None)
            assert await super(FollowedIndex, index).match(blocks) == {"w": 4}
            await admin.execute_command("ACL", "SETUSER", "worker", "+xadd", "+xtrim")
            assert await worker.publish("w", "p:1", 2, blocks[4:5], [])
            assert await index.match(blocks) == {"w": 5}


async def test_a_replica_that_would_be_too_large_is_given_up(
    redis_client: Redis, cluster_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RedisIndex(redis_client, cluster_id)
    await writer.reset("w", "p:1")
    assert await writer.publish("w", "p:1", 0, blocks := chain("a", 3000), [])
    with caplog.at_level(logging.WARNING):
        async with followed(redis_client, cluster_id, bytes_max=50_000) as index:
            await eventually(lambda: "takes more than 50000 bytes" in caplog.text)
            await eventually(lambda: index.replica.num_bytes == 0)
            assert await super(FollowedIndex, index).match(blocks) == {"w": 3000}
            assert index.num_asked == 1


async def test_a_tree_without_changes_is_checked_rarely_and_again_after_a_change(
    redis_url: str, cluster_id: str
) -> None:
    async with (
        connect(redis_url) as redis,
        followed(redis, cluster_id, idle_check_s=60.0) as index,
    ):
        await index.reset("w", "p:1")
        await index.catch_up()
        scan = index.replica.scan
        scanned: list[int] = []

        async def counted(shard: int, bucket: int, limit: int) -> Scan:
            scanned.append(shard)
            return await scan(shard, bucket, limit)

        index.replica.scan = counted  # type: ignore[method-assign]
        blocks = chain("a", 2)
        for number, block in enumerate(blocks):
            assert await index.publish("w", "p:1", number, [block], [])
            await eventually(lambda: bool(scanned))  # the check after the change
            scanned.clear()
            # The embedded Redis ends a waiting call up to 0.5 s late, so this is time for four.
            await asyncio.sleep(2.0)
            assert len(scanned) <= 1  # the log may have had another entry at the check
        assert index.replica.match(blocks, closed=True) == {"w": 2}


@pytest.mark.parametrize("reason", ["not compiled", "turned off"])
async def test_without_a_replica_redis_is_asked(
    redis_client: Redis, cluster_id: str, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(replicas, "IS_COMPILED", reason != "not compiled")
    bytes_max = 0 if reason == "turned off" else 1 << 20
    async with followed(redis_client, cluster_id, bytes_max=bytes_max) as index:
        await index.reset("w", "p:1")
        assert await index.publish("w", "p:1", 0, blocks := chain("a", 3), [])
        assert await super(FollowedIndex, index).match(blocks) == {"w": 3}
        assert index.num_asked == 1
        assert index.replica.shards == []


async def test_a_replica_is_not_used_if_redis_is_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connect(server.url) as redis, followed(redis, "c") as index:
            await index.catch_up()
            server.kill()
            assert index.replica.is_usable
            monkeypatch.setattr(replicas, "STALE_S", 0.1)
            await eventually(lambda: not index.replica.is_usable)
            server.start()
            await eventually(lambda: index.replica.is_usable)


async def test_a_full_log_takes_at_most_64_mb(redis_client: Redis, cluster_id: str) -> None:
    """The log's entries are as large as a batch can make them."""
    key = shard_key(cluster_id, 0)
    append = Script(
        (tree._LUA / "append.lua").read_text()
        + """
        for i = 1, 500 do
          append(KEYS[1], 'kind', 'blocks', 'worker', string.rep('w', 40), 'epoch',
            string.rep('e', 40), 'stored', string.rep('s', 4096), 'removed', '', 'complete', 0)
        end
        """
    )
    for _ in range(26):
        await append(redis_client, [key])
    log = f"{key}:log"
    assert 12_000 <= await redis_client.xlen(log) <= 12_100
    assert 50_000_000 < await redis_client.memory_usage(log, samples=0) < 64_000_000
    await redis_client.delete(log)


async def test_a_sweep_removes_old_entries_of_the_log(redis_client: Redis, cluster_id: str) -> None:
    index = RedisIndex(redis_client, cluster_id)
    log = f"{shard_key(cluster_id, 0)}:log"
    for number in range(1, 251):
        await redis_client.xadd(log, {"a": "b"}, id=f"{number}-0")
    await index.reset("w", "p:1")
    await index.sweep(10)
    # Whole groups of 100 entries are removed.
    assert await redis_client.xlen(log) <= 51
    assert (await redis_client.xrevrange(log, count=1))[0][1][b"kind"] == b"reset"
