"""Every kind of Redis that a URL can name, as real servers: publish, look up, live records."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from tandem.cluster.ray.scale_channel import ScaleChannel
from tandem.common.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.net.store.client import UNREACHABLE, Client, connect, wait_until_answers, warm
from tandem.net.store.registry import Registry
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tandem.prefix_index.redis import RedisIndex
from tandem.router.workers.pools import control_keys, read_pools, request_sizes
from tests.chains import chain
from tests.harness.followed_index import followed
from tests.harness.redis_kinds import (
    HOST,
    QUOTED,
    Server,
    make_certificates,
    redis_cluster,
    sentinel_service,
    tls_front,
)
from tests.service.test_registry import COMPATIBILITY, a_record

pytestmark = pytest.mark.service
QUICK = PublisherConfig(interval_s=0.002, heartbeat_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05)


async def use_all_of_it(redis: Client, cluster: ClusterConfig) -> None:
    """Makes every use of Redis that workers, routers and the controller make, with two shards of
    workers."""
    index = RedisIndex(redis, cluster.cluster_id)
    blocks = chain("a", 600)
    for i in range(33):
        await index.reset(f"w{i}", "1")
        assert await index.publish(f"w{i}", "1", 0, blocks[: 10 * i + 1], [])
    reader = RedisIndex(redis, cluster.cluster_id)
    await reader.open()
    assert await reader.match(blocks) == {f"w{i}": 10 * i + 1 for i in range(33)}
    async with followed(redis, cluster.cluster_id) as replicated:
        assert await replicated.match(blocks) == {f"w{i}": 10 * i + 1 for i in range(33)}
        await index.reset("w0", "2")
        assert await index.publish("w0", "2", 0, blocks[:2], [])
        assert (await replicated.match(blocks))["w0"] == 2
        await index.reset("w0", "1")
        assert await index.publish("w0", "1", 0, blocks[:1], [])
    await index.forget("w32")
    assert await reader.sweep(100)
    assert max((await reader.match(blocks)).values()) == 311

    registry = Registry(redis, cluster)
    await registry.check_compatibility(COMPATIBILITY)
    await registry.write(a_record("w0"))
    await registry.write(a_record("w1"))
    assert [r.worker_id for r in await registry.read()] == ["w0", "w1"]
    read = [await registry.read_all(control_keys(cluster.cluster_id)) for _ in range(2)]
    assert read[0] == read[1]
    assert read[0].records == await registry.read()
    await registry.remove("w0")
    assert [r.worker_id for r in await registry.read()] == ["w1"]


async def use_pools(redis: Client, cluster: ClusterConfig) -> None:
    asked: list[object] = []
    channel = ScaleChannel(cluster.redis_url, cluster.cluster_id, asked.append)
    await asyncio.to_thread(channel.publish, {"prefill": {"wanted": 1}})
    channel.start()
    await request_sizes(redis, cluster.cluster_id, {"prefill": 2})
    async with asyncio.timeout(5):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert asked == [{"prefill": 2}]
    assert await read_pools(redis, cluster.cluster_id) == b'{"prefill": {"wanted": 1}}'


async def test_one_server_with_a_password(cluster_config: ClusterConfig) -> None:
    async with connect(cluster_config.redis_url) as redis:
        await use_all_of_it(redis, cluster_config)
        await use_pools(redis, cluster_config)


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server = Server.start(
        tmp_path, "requirepass default-is-off", f"user alice on >{QUOTED} ~* &* +@all"
    )
    try:
        async with tls_front(server.port, made) as port:
            plain = f"rediss://alice:{QUOTED.replace('%', '%25')}@{HOST}:{port}/0"
            own = f"ssl_certfile={made.certificate}&ssl_keyfile={made.key}"
            url = f"{plain}?ssl_ca_certs={made.authority}&{own}"
            await asyncio.to_thread(wait_until_answers, url, 5.0)
            cluster = ClusterConfig("c", url, "t")
            async with connect(url) as redis:
                await use_all_of_it(redis, cluster)
                await use_pools(redis, cluster)
            for refused in (
                f"{plain}?{own}",  # an authority that nobody here trusts
                f"{plain}?ssl_ca_certs={made.authority}",  # no certificate of the client's own
                url.replace("rediss", "redis").partition("?")[0],  # no TLS
            ):
                with pytest.raises((RedisError, OSError)):
                    async with connect(refused) as redis:
                        await redis.ping()
    finally:
        server.stop()


async def test_sentinel_and_a_fail_over(tmp_path: Path) -> None:
    with sentinel_service(tmp_path) as service:
        await asyncio.to_thread(wait_until_answers, service.url, 5.0)
        cluster = ClusterConfig("c", service.url, "t")
        async with connect(service.url) as redis:
            await use_all_of_it(redis, cluster)
            await use_pools(redis, cluster)
            index = RedisIndex(redis, "d")
            publisher = Publisher(index, "w", "p", config=QUICK)
            publisher.start()
            blocks = chain("b", 2000)
            publisher.add(blocks[:1000], [])
            await until_matched(index, blocks, 1000)
            registry = Registry(redis, cluster)
            before = (await registry.read_all(control_keys("c"))).data_set
            service.master.stop()
            publisher.add(blocks[1000:], [])
            await until_matched(index, blocks, 2000)
            assert (await registry.read_all(control_keys("c"))).data_set != before
            await publisher.aclose()


async def test_redis_cluster_of_three_nodes(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as (url, servers):
        await asyncio.to_thread(wait_until_answers, url, 5.0)
        cluster = ClusterConfig("c", url, "t")
        async with connect(url) as redis:
            await warm(redis, 4)
            await use_all_of_it(redis, cluster)
            await use_pools(redis, cluster)
            publisher = Publisher(RedisIndex(redis, "d"), "w", "p", config=QUICK)
            publisher.start()
            blocks = chain("b", 2000)
            publisher.add(blocks, [])
            await until_matched(RedisIndex(redis, "d"), blocks, 2000)
            await redis.flushall()
            await until_matched(RedisIndex(redis, "d"), blocks, 2000)
            await publisher.aclose()

            servers[0].stop()  # no replica takes its slots
            outcomes = await asyncio.gather(
                *(RedisIndex(redis, f"other{n}").match(blocks) for n in range(20)),
                return_exceptions=True,
            )
            assert {} in outcomes
            errors = [found for found in outcomes if found != {}]
            assert errors
            assert all(isinstance(error, UNREACHABLE) for error in errors)


async def until_matched(index: RedisIndex, blocks: list[bytes], depth: int) -> None:
    give_up_at = time.monotonic() + 60
    found: object = None
    while found != {"w": depth}:
        assert time.monotonic() < give_up_at, f"{found}, not {depth}"
        try:
            found = await index.match(blocks)
        except (RedisError, OSError, TimeoutError) as error:
            found = error
        await asyncio.sleep(0.02)


async def test_a_wrong_password_is_named_for_every_kind(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, 1) as (url, servers):
        wrong = url.replace(QUOTED, "wrong")
        for each in (wrong, wrong.replace("redis+cluster", "redis")):
            with pytest.raises(ConfigError, match="refuses the password") as caught:
                await asyncio.to_thread(wait_until_answers, each, 2.0)
            assert "wrong" not in str(caught.value)
        servers[0].stop()
        with pytest.raises(ConfigError, match=f"{HOST}:{servers[0].port} does not answer"):
            await asyncio.to_thread(wait_until_answers, url, 0.1)
