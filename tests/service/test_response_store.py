"""Kept responses on a real Redis: shared by routers, bounded, and there while Redis is not."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tandem.api.responses import shared
from tandem.api.responses.kept import KeptResponse
from tandem.api.responses.store import ResponseStore, input_item_id
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.errors import (
    BadRequest,
    BodyTooLarge,
    ItemNotFound,
    PreviousResponseNotFound,
    ResponseNotDeleted,
    ResponseNotFound,
)
from tandem.net.store.client import Client, connect

pytestmark = [pytest.mark.service, pytest.mark.asyncio]

LARGE = 4 << 20
BODY = 100_000
UNREACHABLE = "redis://127.0.0.1:1"


@pytest_asyncio.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[Client]:
    client = connect(redis_server.url)
    yield client
    await client.aclose()


@pytest.fixture
def cluster() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def make_store(redis: Client, cluster: str, num_max: int) -> ResponseStore:
    return ResponseStore(redis, cluster, num_max, body_bytes_max=BODY)


def made(tenant: str, text: str = "x") -> tuple[str, KeptResponse]:
    """Returns the id of a new response, and the response."""
    request_id = uuid.uuid4().hex
    said: dict[str, Any] = {"id": f"msg_{request_id}_0", "type": "message", "role": "assistant"}
    body = {"id": f"resp_{request_id}", "output": [{**said, "content": text}]}
    item = {"id": input_item_id("msg", request_id, 0), "type": "message", "role": "user"}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    return body["id"], KeptResponse.of(tenant, body, chat, [item])  # type: ignore[return-value]


async def keep(store: ResponseStore, tenant: str, text: str = "x") -> str:
    response_id, response = made(tenant, text)
    await store.keep(response_id, response)
    return response_id


async def num_found(store: ResponseStore, tenant: str, names: list[str]) -> int:
    found = 0
    for name in names:
        try:
            found += (await store.find(name, tenant)).tenant == tenant
        except ResponseNotFound as error:
            assert "not found" in error.message  # noqa: PT017
    return found


async def test_routers_share_what_they_keep(redis: Client, cluster: str) -> None:
    one, other = (make_store(redis, cluster, 10) for _ in range(2))
    name = await keep(one, "a", "hello")
    assert (await other.messages_of(name, "a"))[1]["content"] == "hello"
    for tenant in ("", "b"):
        with pytest.raises(PreviousResponseNotFound, match="not found"):
            await other.messages_of(name, tenant)
        assert await other.is_of_another(name, tenant)
        with pytest.raises(ResponseNotFound):
            await other.delete(name, tenant)
    assert not await other.is_of_another(name, "a")
    await other.delete(name, "a")
    for store in (one, other):
        with pytest.raises(ResponseNotFound, match="only its last 10 responses"):
            await store.find(name, "a")
    left = await redis.keys(f"*{cluster}*")
    assert [key.rsplit(b":", 1)[1] for key in left] == [b"total"] or sorted(
        key.rsplit(b":", 1)[1] for key in left
    ) == [b"last", b"total"]
    assert await redis.get(f"{{tandem:{cluster}}}:responses:total") == b"0"


async def test_a_tenant_with_many_responses_pushes_out_its_own(redis: Client, cluster: str) -> None:
    store, reader = (make_store(redis, cluster, 10) for _ in range(2))
    first = [await keep(store, tenant) for tenant in ("b", "")]
    names = [await keep(store, "a") for _ in range(40)]
    assert await num_found(reader, "b", first[:1]) == await num_found(reader, "", first[1:]) == 1
    assert await num_found(reader, "a", names) == await num_found(reader, "a", names[-8:]) == 8


async def test_large_responses_push_out_their_tenants_own(redis: Client, cluster: str) -> None:
    store, reader = (make_store(redis, cluster, 100) for _ in range(2))
    first = await keep(store, "b")
    names = [await keep(store, "a", "y" * LARGE) for _ in range(8)]
    assert await num_found(reader, "b", [first]) == 1
    assert await num_found(reader, "a", names) == await num_found(reader, "a", names[-3:]) == 3
    total = int(await redis.get(f"{{tandem:{cluster}}}:responses:total") or 0)
    sizes = [len(value) for value in await redis.hvals(f"{{tandem:{cluster}}}:responses:kept")]  # type: ignore[misc]
    assert total == sum(sizes) <= 32 << 20


async def test_nothing_stays_for_ever(redis: Client, cluster: str) -> None:
    await keep(make_store(redis, cluster, 10), "a")
    for key in await redis.keys(f"*{cluster}*"):
        assert 0 < await redis.ttl(key) <= shared._KEPT_S


async def test_a_router_has_its_own_while_redis_is_away(cluster: str) -> None:
    away = connect(UNREACHABLE)
    store = make_store(away, cluster, 10)
    name = await keep(store, "a")
    assert (await store.find(name, "a")).tenant == "a"
    with pytest.raises(ResponseNotFound):
        await store.find(name, "b")
    await store.delete(name, "a")
    with pytest.raises(ResponseNotFound):
        await store.find(name, "a")
    await away.aclose()


async def test_references_become_the_items_that_they_name(redis: Client, cluster: str) -> None:
    store = make_store(redis, cluster, 300)
    name = (await keep(store, "a", "hello")).removeprefix("resp_")
    said, asked = f"msg_{name}_0", f"msg_{name}_in0"
    new = {"role": "user", "content": "go on"}
    body = {"input": [{"type": "item_reference", "id": asked}, {"id": said}, new]}
    await store.put_items(body, "a")
    assert [item.get("id") for item in body["input"]] == [asked, said, None]
    assert body["input"][1]["content"] == "hello"
    for tenant, item_id in (
        ("b", said),
        ("a", f"msg_{name}_1"),
        ("a", f"rs_{name}_0"),
        ("a", "msg_1"),
        ("a", "msg_" + "0" * 32 + "_0"),
        ("a", "x" * 10_000),
    ):
        wrong = {"input": [{"type": "item_reference", "id": item_id}]}
        with pytest.raises(ItemNotFound, match="not found") as lost:
            await store.put_items(wrong, tenant)
        assert lost.value.http_status == 404
        assert len(lost.value.message) < 300
    for plain in ({"input": "x"}, {}, {"input": [new, 5, {"type": "item_reference"}]}):
        before = str(plain)
        await store.put_items(plain, "a")
        assert str(plain) == before
    names = [(await keep(store, "a")).removeprefix("resp_") for _ in range(257)]
    many = {"input": [{"id": f"msg_{each}_0"} for each in names]}
    with pytest.raises(BadRequest, match="too many or too large responses"):
        await store.put_items(many, "a")


async def test_what_references_stand_for_is_bounded(redis: Client, cluster: str) -> None:
    store = make_store(redis, cluster, 300)
    name = (await keep(store, "a", "y" * 60_000)).removeprefix("resp_")
    other = (await keep(store, "a", "y" * 60_000)).removeprefix("resp_")
    with pytest.raises(BadRequest, match="Duplicate item found"):
        await store.put_items({"input": [{"id": f"msg_{name}_0"}] * 2}, "a")
    with pytest.raises(BodyTooLarge, match="100000 bytes together"):
        await store.put_items({"input": [{"id": f"msg_{each}_0"} for each in (name, other)]}, "a")
    names = [(await keep(store, "a", "y" * 60_000)).removeprefix("resp_") for _ in range(7)]
    with pytest.raises(BadRequest, match="too large responses"):
        await store.put_items({"input": [{"id": f"msg_{each}_in0"} for each in names]}, "a")


async def test_a_response_that_redis_has_is_not_deleted_while_redis_is_away(
    redis: Client, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(redis, cluster, 10)
    name = await keep(store, "a")
    away = connect(UNREACHABLE)
    with monkeypatch.context() as patch:
        patch.setattr(store._shared, "_redis", away)
        with pytest.raises(ResponseNotDeleted) as refused:
            await store.delete(name, "a")
        assert (refused.value.http_status, refused.value.retry_after_whole_s) == (503, 1)
        assert (await store.find(name, "a")).tenant == "a"
    await store.delete(name, "a")
    for each in (store, make_store(redis, cluster, 10)):
        with pytest.raises(ResponseNotFound):
            await each.find(name, "a")
    await away.aclose()
