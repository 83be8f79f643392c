"""API keys over real sockets: two routers, their own real Redis, and a scripted worker."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc.aio
import httpx
import msgspec
import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.net.security import keys
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.key_service import KeyService
from tandem.net.store.client import connect, connect_blocking
from tandem.router.admission.tenants import cache_salt
from tests.harness.cluster import free_port
from tests.harness.keyed_routers import (
    TOKEN,
    Routers,
    call,
    create,
    is_accepted,
    is_refused,
    ready,
    refused_soon,
    routers,
    taken_soon,
    tandem,
    until,
)
from tests.harness.waiting import eventually

__all__ = ["routers"]
PORTS = ("--admin-port", str(free_port()), "--admin-grpc-port", str(free_port()))
pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


async def test_from_open_to_closed(routers: Routers, caplog: pytest.LogCaptureFixture) -> None:
    """Loopback is open without keys; the first key closes both routers, for HTTP and gRPC."""
    one, two = await routers.start("r1"), await routers.start("r2")
    for url in (one, two):
        await ready(url)
        assert (await call(url)).status_code == 200
        assert (await call(url, "sk-whatever")).status_code == 200
    admin = routers.admin_of(one)
    user, metrics = await create(admin, "acme"), await create(admin, "prometheus", "metrics")
    operator = await create(admin, "operators", "operator")
    for url, name in ((one, "r1"), (two, "r2")):
        await refused_soon(url, "")
        await taken_soon(url, operator)  # once a router has the last key, it has all of them
        assert (await call(url, user)).status_code == 200
        caplog.clear()
        refused = await call(url)
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert len([r for r in caplog.records if "refused" in r.message]) == 1
        for path, method, given, expected in (
            ("/health", "GET", "", 200),
            ("/ready", "GET", "", 200),
            ("/v1/models", "GET", "", 401),
            ("/v1/models", "GET", user, 200),
            ("/v1/nothing", "GET", "", 401),
            ("/v1/completions", "POST", metrics, 403),
            ("/v1/completions", "POST", operator, 200),
        ):
            answer = await call(url, given, path, method)
            assert answer.status_code == expected, (path, given[:12], answer.text)
        await check_grpc(routers.grpc_address(name), user, metrics)
    listed = (await call(admin, path="/v1/keys", method="GET")).text
    assert "digest" not in listed
    assert user.split("-", 2)[2] not in listed


async def check_grpc(address: str, user: str, metrics: str) -> None:
    assert await grpc_code(address, "") is grpc.StatusCode.UNAUTHENTICATED
    assert await grpc_code(address, "tandem-0-0") is grpc.StatusCode.UNAUTHENTICATED
    assert await grpc_code(address, metrics) is grpc.StatusCode.PERMISSION_DENIED
    assert await grpc_code(address, user) is grpc.StatusCode.OK


async def grpc_code(address: str, key: str) -> grpc.StatusCode:
    """The outcome of a call with this key."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    request = inference_pb2.GenerateRequest(text="x", max_tokens=1)
    async with grpc.aio.insecure_channel(address) as channel:
        call = InferenceStub(channel).Generate(request, metadata=metadata)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return await call.code()


async def test_the_tenant_is_the_keys(routers: Routers) -> None:
    url = await routers.start("r1")
    await ready(url)
    found = {tenant: await create(routers.admin_of(url), tenant) for tenant in ("acme", "other")}
    ids = {}
    for tenant, key in found.items():
        routers.worker.submitted.clear()
        ids[tenant] = (await call(url, key)).json()["id"]
        (submitted,) = routers.worker.submitted
        assert submitted.input.cache_salt == cache_salt(TOKEN, tenant)  # type: ignore[attr-defined]
    path = f"/v1/requests/{ids['acme']}"
    assert (await call(url, found["acme"], path, "GET")).status_code == 200
    assert (await call(url, found["other"], path, "GET")).status_code == 404
    async with grpc.aio.insecure_channel(routers.grpc_address("r1")) as channel:
        asked = inference_pb2.GetRequestRequest(request_id=ids["acme"])
        metadata = (("authorization", f"Bearer {found['other']}"),)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await InferenceStub(channel).GetRequest(asked, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_revoked_key_ends_everywhere_with_redis_and_without(routers: Routers) -> None:
    one, two = await routers.start("r1", api="http"), await routers.start("r2")
    three = await routers.start("grpc-0", api="grpc")
    assert routers.started["r1"][0].grpc_port == 0
    for url in (one, two, three):
        await ready(url)
    first, second = (
        await create(routers.admin_of(one), "acme"),
        await create(routers.admin_of(two), "acme"),
    )
    await create(routers.admin_of(one), "keeps-the-door-closed")
    for url in (one, two):
        await until(partial(is_accepted, url, second))
    await eventually(lambda: len(routers.started["r1"][0]._keys._others) == 2)
    replica = routers.grpc_address("grpc-0")
    await eventually(lambda: len(routers.started["grpc-0"][0]._keys.ring.records) == 3)
    assert await grpc_code(replica, second) is grpc.StatusCode.OK
    done = await tandem(routers.admin_of(one), "revoke", first.split("-")[1])
    assert (done.returncode, done.stdout.count("confirmed")) == (0, 4), done.stdout
    await refused_soon(one, first)
    await refused_soon(two, first)
    routers.redis.kill()
    done = await tandem(routers.admin_of(one), "revoke", second.split("-")[1])
    assert done.returncode == 1
    assert "redis: Redis does not answer" in done.stdout
    assert done.stdout.count("confirmed") == 3
    assert await is_refused(one, second)
    assert await is_refused(two, second)
    assert await grpc_code(replica, second) is grpc.StatusCode.UNAUTHENTICATED
    # Redis restarts empty: the routers write their records to it, including tombstones.
    await asyncio.to_thread(routers.redis.restart)
    fourth = await routers.start("r4")

    async def is_closed() -> bool:
        return await is_refused(fourth, second) and await is_refused(fourth, first)

    await until(is_closed)


async def test_an_old_record_that_is_written_back_opens_nothing(routers: Routers) -> None:
    one = await routers.start("r1")
    await ready(one)
    key = await create(routers.admin_of(one), "acme")
    redis = connect_blocking(routers.redis.url)
    name = f"{{tandem:{routers.cluster.cluster_id}}}:keys"
    old = redis.hgetall(name)
    assert (await tandem(routers.admin_of(one), "revoke", key.split("-")[1])).returncode == 0
    redis.hset(name, mapping=old)  # type: ignore[arg-type]
    redis.incr(f"{name}:changes")
    await asyncio.sleep(1.5)
    assert await is_refused(one, key)
    (healed,) = redis.hgetall(name).values()  # type: ignore[union-attr]
    assert msgspec.json.decode(healed, type=keys.KeyRecord).revoked_at
    # A router that starts now reads the tombstone.
    assert await is_refused(await routers.start("r2"), key)


async def test_a_router_that_does_not_answer_is_named(routers: Routers) -> None:
    one = await routers.start("r1")
    await ready(one)
    redis = connect_blocking(routers.redis.url)
    gone = f"http://127.0.0.1:{free_port()}"
    seconds, _ = redis.time()  # type: ignore[misc]
    name = f"{{tandem:{routers.cluster.cluster_id}}}:routers"
    redis.hset(name, "crashed", f"{seconds * 1000} {gone}")
    key = await create(routers.admin_of(one), "acme")
    await eventually(lambda: "crashed" in routers.started["r1"][0]._keys._others)
    done = await tandem(routers.admin_of(one), "revoke", key.split("-")[1])
    assert done.returncode == 1
    assert f"crashed: {gone} does not answer" in done.stdout
    assert "r1: revocation confirmed" in done.stdout
    assert (await tandem(routers.admin_of(one), "revoke", "nothing")).stderr.startswith(
        "tandem: there is no key"
    )


async def test_records_are_taken_from_routers_only(routers: Routers) -> None:
    """A worker has the cluster's token and its own Redis user, which must not be enough to act as a
    router."""
    one = await routers.start("r1")
    await ready(one)
    admin = routers.admin_of(one)
    operator = await create(routers.admin_of(one), "ops", "operator")
    forged = keys.create("acme", "operator", now=time.time())
    body = msgspec.json.encode([forged.record])

    async def send(signature: bytes) -> int:
        headers = {b"x-tandem-signature": signature, b"content-type": b"application/json"}
        async with httpx.AsyncClient(base_url=one) as http:
            sent = await http.post("/v1/keys/records", content=body, headers=headers)
        return sent.status_code

    async def entries() -> list[dict[str, object]]:
        answer = await call(admin, operator, "/v1/cluster/audit", "GET")
        return list(answer.json()["entries"])

    by_token = hmac.new(TOKEN.encode(), b"tandem keys" + body, hashlib.sha256).hexdigest()
    by_user = signed_by(routers.redis.url_of("worker"), routers.cluster, body)
    for signature in (b"", b"0" * 64, b"\xe9" * 64, by_token.encode(), by_user):
        assert await send(signature) == 401
    assert await is_refused(one, forged.text)

    async def are_told() -> bool:
        refusals = [e for e in await entries() if e["outcome"] == "invalid_api_key"]
        return len([e for e in refusals if "/v1/keys/records" in str(e["what"])]) == 5

    await until(are_told)
    assert await send(signed_by(routers.cluster.redis_url, routers.cluster, body)) == 200
    assert await is_accepted(one, forged.text)
    key_id = forged.record.key_id

    async def is_told() -> bool:
        return any(e["what"] == f"key {key_id}, from another router" for e in await entries())

    await until(is_told)
    assert await send(signed_by(routers.cluster.redis_url, routers.cluster, body)) == 200
    told = [e for e in await entries() if key_id in str(e["what"])]
    assert len(told) == 1, "a record that is known changes nothing"
    assert told[0]["after"] == "valid operator of acme, version 1"


def signed_by(redis_url: str, cluster: ClusterConfig, body: bytes) -> bytes:
    """The signature that a process with this Redis URL can create."""
    process = replace(cluster, redis_url=redis_url)
    service = KeyService(connect(redis_url), process, KeyRing(), router_id="x", file="")
    return service._sign(body).encode()


async def test_a_key_is_rotated_twice_under_load(routers: Routers) -> None:
    one, two = await routers.start("r1"), await routers.start("r2")
    await ready(one)
    await ready(two)
    key = [await create(routers.admin_of(one), "acme")]
    await until(partial(is_accepted, two, key[0]))
    statuses: list[int] = []
    stop = asyncio.Event()

    async def ask(url: str) -> None:
        while not stop.is_set():
            statuses.append((await call(url, key[-1])).status_code)

    asking = [asyncio.create_task(ask(url)) for url in (one, two) for _ in range(2)]
    for _ in range(2):
        done = await tandem(routers.admin_of(one), "rotate", key[0].split("-")[1], "--grace", "1h")
        key.append(done.stdout.strip())
        before = len(statuses)
        await eventually(lambda before=before: len(statuses) > before + 20)  # type: ignore[misc]
    stop.set()
    await asyncio.gather(*asking)
    assert set(statuses) == {200}
    # only the previous secret remains valid for the grace period
    assert await is_refused(one, key[0])
    assert not await is_refused(one, key[1])


async def test_a_router_that_knows_no_keys_lets_nobody_in(routers: Routers) -> None:
    routers.redis.kill()
    url = await routers.start("r1", "0.0.0.0", host="0.0.0.0", allow_anonymous=True)
    admin = routers.admin_of(url)
    for at, path in ((url, "/v1/models"), (admin, "/v1/cluster"), (admin, "/metrics")):
        answer = await call(at, "", path, "GET")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unknown")
    assert (await call(url, "", "/health", "GET")).status_code == 200


async def test_keys_of_a_file_need_no_redis(routers: Routers, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.ops.cli", "keys", "create", "--tenant", "a", "--file", file],
        capture_output=True,
        text=True,
    )
    key = made.stdout.strip()
    assert made.returncode == 0, made.stderr
    url = await routers.start("r1", host="0.0.0.0", keys_file=str(file))
    await ready(url)
    assert (await call(url, key)).status_code == 200
    assert await is_refused(url, "")


@pytest.mark.parametrize("option", ["--host", "--admin-host"])
@pytest.mark.parametrize("program", [["router", "--model", "smollm2"], ["up"]])
async def test_an_outer_address_without_keys_is_refused(
    routers: Routers, program: list[str], option: str
) -> None:
    environment = {
        **os.environ,
        "TANDEM_CLUSTER_ID": routers.cluster.cluster_id,
        "TANDEM_REDIS_URL": routers.cluster.redis_url,
        "TANDEM_CLUSTER_TOKEN": TOKEN,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.ops.cli", *program, option, "0.0.0.0", *PORTS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert "--allow-anonymous" in done.stderr.splitlines()[-1]
