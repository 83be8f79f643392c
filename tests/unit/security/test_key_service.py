"""A router's keys follow Redis, whatever changes while they are read."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from tandem.config.cluster import ClusterConfig
from tandem.security import keys
from tandem.security.key_ring import KeyRing
from tandem.security.key_service import KeyService
from tandem.security.key_store import KeyStore
from tandem.security.keys import KeyRecord

pytestmark = pytest.mark.asyncio


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
    await service.refresh("http://127.0.0.1:1")
    assert ring.records.keys() == {first.key_id}
    monkeypatch.undo()
    await service.refresh("http://127.0.0.1:1")
    assert ring.records.keys() == {first.key_id, late.key_id}


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
