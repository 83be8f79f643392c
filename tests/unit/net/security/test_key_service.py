"""A router's keys follow Redis, whatever changes while they are read."""

from __future__ import annotations

import time

import msgspec
import pytest
from redis.asyncio import Redis

from tandem.common.config.cluster import ClusterConfig
from tandem.net.security import keys
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.key_service import KeyService
from tandem.net.security.key_store import KeyStore
from tandem.net.security.keys import KeyRecord

pytestmark = pytest.mark.asyncio

URL = "http://127.0.0.1:1"


async def test_a_key_that_is_made_while_keys_are_read_is_known_a_second_later(
    redis_client: Redis, cluster_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KeyStore(redis_client, cluster_config.cluster_id)
    first, late = (keys.create("acme", "user", now=time.time()).record for _ in range(2))
    await other.put(first)
    ring = KeyRing()
    service = KeyService(redis_client, cluster_config, ring, router_id="r1", file="")
    read = service._store.read

    async def read_and_change() -> list[KeyRecord]:
        found = await read()
        await other.put(late)
        return found

    monkeypatch.setattr(service._store, "read", read_and_change)
    await service.refresh(URL)
    assert ring.records.keys() == {first.key_id}
    monkeypatch.undo()
    await service.refresh(URL)
    assert ring.records.keys() == {first.key_id, late.key_id}


async def lose_data(redis: Redis, cluster: ClusterConfig) -> None:
    """Leaves Redis without keys, as a restart does that no connection notices."""
    name = f"{{tandem:{cluster.cluster_id}}}:keys"
    await redis.delete(name, f"{name}:changes")


@pytest.mark.parametrize("is_change_seen", [False, True])
async def test_a_redis_that_lost_its_data_gets_the_keys_back_a_second_later(
    redis_client: Redis, cluster_config: ClusterConfig, is_change_seen: bool
) -> None:
    service = KeyService(redis_client, cluster_config, KeyRing(), router_id="r1", file="")
    await service.refresh(URL)
    made = (await service.create("acme", "user")).record
    if is_change_seen:
        await service.refresh(URL)
    await lose_data(redis_client, cluster_config)
    await service.refresh(URL)
    assert await KeyStore(redis_client, cluster_config.cluster_id).read() == [made]


async def test_as_many_changes_after_a_loss_are_others(
    redis_client: Redis, cluster_config: ClusterConfig
) -> None:
    service = KeyService(redis_client, cluster_config, KeyRing(), router_id="r1", file="")
    made = (await service.create("acme", "user")).record
    await service.refresh(URL)
    await lose_data(redis_client, cluster_config)
    store = KeyStore(redis_client, cluster_config.cluster_id)
    other = keys.create("other", "user", now=1.0).record
    await store.put(other)
    await service.refresh(URL)
    assert service.ring.records.keys() == {made.key_id, other.key_id}
    assert {record.key_id for record in await store.read()} == {made.key_id, other.key_id}


async def test_what_redis_missed_is_written_a_second_after_it_is_back(
    redis_client: Redis, cluster_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away with its data, so that the number of changes is as it was."""

    async def fail(_: KeyRecord) -> bool:
        raise ConnectionError("says the test")

    one, two = (
        KeyService(redis_client, cluster_config, KeyRing(), router_id=name, file="")
        for name in ("r1", "r2")
    )
    store = KeyStore(redis_client, cluster_config.cluster_id)
    for number, service in enumerate((one, two), start=1):
        made = (await one.create("acme", "user")).record
        for each in (one, two):
            await each.refresh(URL)
        with monkeypatch.context() as patch:
            patch.setattr(one._store, "put", fail)
            patch.setattr(one, "_routers", {})
            assert (await one.revoke(made.key_id)).redis.startswith("Redis does not answer")
        if service is two:  # the first router told it, and ended
            body = msgspec.json.encode([one.ring.records[made.key_id]])
            two.take(body, two._sign(body))
        await service.refresh(URL)
        assert sum(bool(record.revoked_at) for record in await store.read()) == number


async def test_a_revocation_takes_the_place_of_a_rotation_of_its_version(
    redis_client: Redis, cluster_config: ClusterConfig
) -> None:
    store = KeyStore(redis_client, cluster_config.cluster_id)
    made = keys.create("acme", "user", now=1.0).record
    rotated = keys.rotate(made, now=2.0, grace_s=60).record
    tombstone = keys.revoke(made, now=2.0)
    assert rotated.version == tombstone.version
    assert [await store.put(r) for r in (made, rotated, made, tombstone)] == [1, 1, 0, 1]
    assert [await store.put(r) for r in (rotated, tombstone, made)] == [0, 0, 0]
    assert await store.read() == [tombstone]
