"""Routers with API keys in this process, with a real Redis and one scripted worker."""

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

import httpx
import pytest_asyncio

from tandem.api.server import Router
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.store.client import connect
from tests.harness.scripted_worker import Say, ScriptedWorker, saying

TOKEN = "a-token-for-tests"
BODY = {"prompt": "x", "max_tokens": 1}


@dataclass
class Routers:
    """Routers of one cluster in this process; each listens on all addresses."""

    cluster: ClusterConfig
    redis: EmbeddedRedis
    worker: ScriptedWorker
    started: dict[str, tuple[Router, asyncio.Task[None]]] = field(default_factory=dict)

    async def start(self, name: str, admin_host: str = "127.0.0.1", **settings: object) -> str:
        """Starts a router and returns its URL."""
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
        """Finds the admin URL of the router with this public URL."""
        routers = (router for router, _ in self.started.values())
        (router,) = (r for r in routers if url.endswith(f":{r.http_port}"))
        return f"http://127.0.0.1:{router.admin.http_port}"


@pytest_asyncio.fixture(loop_scope="module")
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    cluster_id = f"test-{uuid.uuid4().hex[:12]}"
    with EmbeddedRedis(tmp_path / "redis", cluster_id=cluster_id) as server:
        cluster = ClusterConfig(cluster_id, server.url_of("router"), TOKEN)
        redis = connect(server.url)
        fingerprint = resolve("smollm2").fingerprint
        worker = await ScriptedWorker(
            redis, cluster, fingerprint=fingerprint, worker_id="decode-0"
        ).start()
        numbers = itertools.count(1)

        async def answer(submit: worker_pb2.SubmitSequence, say: Say) -> None:
            await saying([1000])(submit, say)
            # otherwise the routers would count the requests as still running
            worker.tell_load(next(numbers))

        worker.script = answer
        found = Routers(cluster, server, worker)
        yield found
        for name in list(found.started):
            await found.stop(name)
        if not server.is_running:
            await asyncio.to_thread(server.restart)
        # Some pooled connections were closed by the killed server, which shows only when they are
        # used.
        await redis.connection_pool.disconnect(inuse_connections=False)
        await worker.stop()
        await redis.aclose()


async def until(probe: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Polls until `probe` returns True. Raises TimeoutError."""
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
    """Runs `tandem keys` as a subprocess."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem.ops.cli", "keys", *words, "--url", url],
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


async def taken_soon(url: str, key: str) -> None:
    async def is_taken() -> bool:
        return (await call(url, key)).status_code == 200

    await until(is_taken, 2.0)
