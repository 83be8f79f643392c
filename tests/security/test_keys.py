"""API keys over real sockets: two routers, a real Redis of their own, and a scripted worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc.aio
import httpx
import msgspec
import pytest
import pytest_asyncio

from tandem.cluster.launch.embedded_redis import EmbeddedRedis
from tandem.config.admin import AdminOptions
from tandem.config.cluster import ClusterConfig
from tandem.config.router import RouterConfig
from tandem.models.source import resolve
from tandem.router.admission.tenants import cache_salt
from tandem.router.server import Router
from tandem.rpc.tandem.v1 import inference_pb2, worker_pb2
from tandem.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.security import keys
from tandem.store.client import connect, connect_blocking
from tests.harness.cluster import free_port
from tests.harness.scripted_worker import Say, ScriptedWorker, saying
from tests.service.router.conftest import eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

TOKEN = "a-token-for-tests"
BODY = {"prompt": "x", "max_tokens": 1}
PORTS = ("--admin-port", str(free_port()), "--admin-grpc-port", str(free_port()))


@dataclass
class Routers:
    """Routers of one cluster, in this process; each has its ports on all addresses."""

    cluster: ClusterConfig
    redis: EmbeddedRedis
    worker: ScriptedWorker
    started: dict[str, tuple[Router, asyncio.Task[None]]] = field(default_factory=dict)

    async def start(self, name: str, admin_host: str = "127.0.0.1", **settings: object) -> str:
        """Returns the router's URL."""
        config = RouterConfig(
            cluster=self.cluster,
            model="smollm2",
            router_id=name,
            http_port=0,
            grpc_port=0,
            admin=AdminOptions(host=admin_host, port=0, grpc_port=0),
            **{"host": "127.0.0.1", "drain_deadline_s": 1.0, **settings},  # type: ignore[arg-type]
        )
        router = Router(config)
        task = asyncio.create_task(router.run())
        listening = asyncio.create_task(router.listening.wait())
        await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        self.started[name] = (router, task)
        return f"http://127.0.0.1:{router.http_port}"

    async def stop(self, name: str) -> None:
        router, task = self.started.pop(name)
        router.stop()
        await task

    def grpc_address(self, name: str) -> str:
        return f"127.0.0.1:{self.started[name][0].grpc_port}"

    def admin_of(self, url: str) -> str:
        """Returns the admin URL of the router with this public one."""
        routers = (router for router, _ in self.started.values())
        (router,) = (r for r in routers if url.endswith(f":{r.http_port}"))
        return f"http://127.0.0.1:{router.admin.http_port}"


@pytest_asyncio.fixture(loop_scope="module")
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        cluster = ClusterConfig(f"test-{uuid.uuid4().hex[:12]}", server.url, TOKEN)
        redis = connect(server.url)
        fingerprint = resolve("smollm2").fingerprint
        worker = await ScriptedWorker(
            redis, cluster, fingerprint=fingerprint, worker_id="decode-0"
        ).start()
        numbers = itertools.count(1)

        async def answer(submit: worker_pb2.SubmitSequence, say: Say) -> None:
            await saying([1000])(submit, say)
            worker.tell_load(next(numbers))  # else routers believe that all are still there

        worker.script = answer
        found = Routers(cluster, server, worker)
        yield found
        for name in list(found.started):
            await found.stop(name)
        if not server.is_running:
            await asyncio.to_thread(server.restart)
        # The server that was killed may have closed some of these, which shows at their next use.
        await redis.connection_pool.disconnect(inuse_connections=False)
        await worker.stop()
        await redis.aclose()


async def until(probe: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Asks until the answer is yes. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await probe():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def ready(url: str) -> None:
    async def is_ready() -> bool:
        return (await call(url, path="/ready", method="GET")).status_code == 200

    await until(is_ready)


async def call(
    url: str, key: str = "", path: str = "/v1/completions", method: str = "POST", **body: object
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as http:
        sent = (body or BODY) if method == "POST" else None
        return await http.request(method, path, json=sent)


async def tandem(url: str, *words: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `tandem keys` as an operator does."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.cli", "keys", *words, "--url", url],
        env={**os.environ, "TANDEM_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def create(url: str, tenant: str, role: str = "user") -> str:
    done = await tandem(url, "create", "--tenant", tenant, "--role", role)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def is_refused(url: str, key: str) -> bool:
    return (await call(url, key)).status_code == 401


async def is_accepted(url: str, key: str) -> bool:
    return (await call(url, key)).status_code == 200


async def refused_soon(url: str, key: str) -> None:
    await until(partial(is_refused, url, key), 2.0)


async def test_from_open_to_closed(routers: Routers, caplog: pytest.LogCaptureFixture) -> None:
    """Loopback is open without keys; the first key closes both routers, over HTTP and gRPC."""
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
    async with grpc.aio.insecure_channel(address) as channel:
        for key, code in (
            ("", grpc.StatusCode.UNAUTHENTICATED),
            ("tandem-0-0", grpc.StatusCode.UNAUTHENTICATED),
            (metrics, grpc.StatusCode.PERMISSION_DENIED),
            (user, None),
        ):
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            request = inference_pb2.GenerateRequest(text="x", max_tokens=1)
            try:
                async for _ in InferenceStub(channel).Generate(request, metadata=metadata):
                    pass
                seen = None
            except grpc.aio.AioRpcError as error:
                seen = error.code()
            assert seen is code


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
    one, two = await routers.start("r1"), await routers.start("r2")
    await ready(one)
    await ready(two)
    first, second = (
        await create(routers.admin_of(one), "acme"),
        await create(routers.admin_of(two), "acme"),
    )
    await create(routers.admin_of(one), "keeps-the-door-closed")
    for url in (one, two):
        await until(partial(is_accepted, url, second))
    await eventually(lambda: len(routers.started["r1"][0]._keys._others) == 1)
    done = await tandem(routers.admin_of(one), "revoke", first.split("-")[1])
    assert (done.returncode, done.stdout.count("confirmed")) == (0, 3), done.stdout
    await refused_soon(one, first)
    await refused_soon(two, first)
    routers.redis.kill()
    done = await tandem(routers.admin_of(one), "revoke", second.split("-")[1])
    assert done.returncode == 1
    assert "redis: Redis is away" in done.stdout
    assert done.stdout.count("confirmed") == 2
    assert await is_refused(one, second)
    assert await is_refused(two, second)
    # Redis comes back empty: the routers write what they know, tombstones included.
    await asyncio.to_thread(routers.redis.restart)
    three = await routers.start("r3")

    async def is_closed() -> bool:
        return await is_refused(three, second) and await is_refused(three, first)

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
    # A router that is started now learns of the tombstone.
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
    assert "r1: confirmed" in done.stdout
    assert (await tandem(routers.admin_of(one), "revoke", "nothing")).stderr.startswith(
        "tandem: there is no key"
    )


async def test_records_are_taken_from_routers_only(routers: Routers) -> None:
    one = await routers.start("r1")
    await ready(one)
    await create(routers.admin_of(one), "acme")
    forged = keys.create("acme", "operator", now=0.0)
    body = msgspec.json.encode([forged.record])
    async with httpx.AsyncClient(base_url=one) as http:
        for signature in (b"", b"0" * 64, b"\xe9" * 64):
            headers = {b"x-tandem-signature": signature, b"content-type": b"application/json"}
            answer = await http.post("/v1/keys/records", content=body, headers=headers)
            assert answer.status_code == 401
    assert await is_refused(one, forged.text)


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
    assert await is_refused(one, key[0])  # only the secret before the last one has grace
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
        [sys.executable, "-m", "tandem.cli", "keys", "create", "--tenant", "a", "--file", file],
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
        [sys.executable, "-m", "tandem.cli", *program, option, "0.0.0.0", *PORTS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert "--allow-anonymous" in done.stderr.splitlines()[-1]
