"""A router in this process, on a real Redis, with two scripted decode workers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tandem.api.server import Router
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.net.store.client import connect
from tests.harness.scripted_worker import ScriptedWorker, silent
from tests.harness.waiting import eventually

MODEL = "smollm2"
BODY_BYTES_MAX = 1 << 20
ANY_ADMIN_PORTS = AdminOptions(port=0, grpc_port=0)


@dataclass
class RunningRouter:
    router: Router
    workers: list[ScriptedWorker]
    tokenizer: Tokenizer
    http: httpx.AsyncClient
    admin: httpx.AsyncClient  # the operators' port
    openai: AsyncOpenAI

    def script(self, script: object) -> None:
        """The same script for every worker."""
        for worker in self.workers:
            worker.script = script  # type: ignore[assignment]

    @property
    def submitted(self) -> list[object]:
        return [s for w in self.workers for s in w.submitted]

    @property
    def cancelled(self) -> list[str]:
        return [c for w in self.workers for c in w.cancelled]

    def outcomes(self) -> dict[str, float]:
        """Requests counted so far, by outcome."""
        found: dict[str, float] = {}
        for family in self.router.generator.metrics.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    name = sample.labels["outcome"]
                    found[name] = found.get(name, 0) + sample.value
        return found

    def num_running(self) -> float:
        return self.router.generator.metrics.requests_running._value.get()


@pytest.fixture(scope="module")
def model_folder() -> Path:
    """The model that the router serves; a module may have its own."""
    return resolve(MODEL).path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    redis_server: EmbeddedRedis, request: pytest.FixtureRequest, model_folder: Path
) -> AsyncIterator[RunningRouter]:
    """A module's `ROUTER` are settings of its own, and `MAX_MODEL_LEN` is the context of its
    workers."""
    cluster = ClusterConfig(f"test-{uuid.uuid4().hex[:12]}", redis_server.url, "a-token-for-tests")
    folder = resolve(str(model_folder))
    redis = connect(redis_server.url)
    workers = []
    for n in range(2):
        worker = ScriptedWorker(
            redis, cluster, fingerprint=folder.fingerprint, worker_id=f"decode-{n}"
        )
        worker.max_model_len = getattr(request.module, "MAX_MODEL_LEN", worker.max_model_len)
        workers.append(await worker.start())
    router = Router(
        RouterConfig(
            cluster=cluster,
            model=str(model_folder),
            served_model_name="tiny",
            http_port=0,
            grpc_port=0,
            admin=ANY_ADMIN_PORTS,
            body_bytes_max=BODY_BYTES_MAX,
            hold_deadline_s=5.0,
            lookup_deadline_s=5.0,
            **getattr(request.module, "ROUTER", {}),
        )
    )
    task = asyncio.create_task(router.run())
    await router.listening.wait()
    url = f"http://127.0.0.1:{router.http_port}"
    async with (
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router.admin.http_port}", timeout=20
        ) as admin,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as openai,
    ):
        started = RunningRouter(router, workers, Tokenizer(folder.path), http, admin, openai)
        await eventually(lambda: all(_is_up(router, w) for w in workers))
        await eventually(lambda: not router.generator.not_ready_reason())
        yield started
    router.stop()
    await task
    for worker in workers:
        await worker.stop()
    await redis.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def router(running: RunningRouter) -> AsyncIterator[RunningRouter]:
    """Resets the router to its start: both workers connected, silent, and nothing counted as
    theirs."""
    running.script(silent)
    await eventually(lambda: all(_is_up(running.router, w) for w in running.workers))
    for worker in running.workers:
        worker.submitted.clear()
        worker.cancelled.clear()
    yield running
    await eventually(lambda: running.num_running() == 0)


def _is_up(router: Router, worker: ScriptedWorker) -> bool:
    client = router.view.client(worker.worker_id)
    return worker.has_stream and client is not None and client.is_up
