"""Records in Redis that cannot be decoded end no router, and hide no valid records."""

from __future__ import annotations

import msgspec
import pytest

from tandem.net.security import keys
from tandem.net.security.key_store import KeyStore
from tandem.net.store.registry import Registry
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

NO_UTF8 = b"\xff\xfe"


async def test_a_worker_whose_record_is_no_utf8_is_left_out(router: RunningRouter) -> None:
    view = router.router.view
    registry = Registry(view.redis, view.cluster)
    (good, *_) = await registry.read()
    data = msgspec.msgpack.encode(msgspec.structs.replace(good, worker_id="wz", pool="wz"))
    key = registry._record_key("broken")
    workers = registry._workers_key
    await view.redis.set(key, data.replace(b"wz", NO_UTF8), px=5000)
    await view.redis.sadd(workers, "broken", NO_UTF8)
    try:
        found = {record.worker_id for record in await registry.read()}
        assert found == {worker.worker_id for worker in router.workers}
    finally:
        await view.redis.delete(key)
        await view.redis.srem(workers, "broken", NO_UTF8)


async def test_a_key_whose_record_is_no_utf8_is_left_out(router: RunningRouter) -> None:
    view = router.router.view
    store = KeyStore(view.redis, f"{view.cluster.cluster_id}-other")
    good = keys.create("acme", "user", now=0.0).record
    await store.put(good)
    broken = msgspec.json.encode(good).replace(b"acme", NO_UTF8)
    await view.redis.hset(store._records, "broken", broken)  # type: ignore[misc]
    assert await store.read() == [good]
