"""A router in its own process, with a scripted worker in this process that answers immediately."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.store.client import connect
from tests.harness.cluster import START_DEADLINE_S, free_port
from tests.harness.scripted_worker import Say, ScriptedWorker, saying

MODEL = "smollm2"


@dataclass(frozen=True)
class RouterProcess:
    """A running router: its process, its ports, and its cluster."""

    pid: int
    http_port: int
    grpc_port: int
    admin_port: int
    admin_grpc_port: int
    cluster: ClusterConfig
    worker: ScriptedWorker
    process: asyncio.subprocess.Process


@asynccontextmanager
async def started_router(folder: Path, *options: str) -> AsyncIterator[RouterProcess]:
    """Starts Redis, a worker and the router, whose log is in the folder. Yields when it is
    ready."""
    with EmbeddedRedis() as server:
        cluster = ClusterConfig(f"alone-{uuid.uuid4().hex[:8]}", server.url, "a-token-for-tests")
        redis = connect(server.url)
        fingerprint = resolve(MODEL).fingerprint
        worker = await ScriptedWorker(redis, cluster, fingerprint=fingerprint).start()
        numbers = itertools.count(1)

        async def answer(submit: worker_pb2.SubmitSequence, say: Say) -> None:
            await saying([1000] * submit.input.max_tokens)(submit, say)
            # otherwise the router would count the requests as still running
            worker.tell_load(next(numbers))
            worker.submitted.clear()
            worker.cancelled.clear()

        worker.script = answer
        ports = [free_port() for _ in range(4)]
        environment = {
            **os.environ,
            "TANDEM_CLUSTER_ID": cluster.cluster_id,
            "TANDEM_REDIS_URL": server.url,
            "TANDEM_CLUSTER_TOKEN": cluster.token,
        }
        command = [sys.executable, "-m", "tandem.router", "--model", MODEL]
        names = ("--http-port", "--grpc-port", "--admin-port", "--admin-grpc-port")
        for name, port in zip(names, ports, strict=True):
            command += [name, str(port)]
        command += options
        with (folder / "router.log").open("wb") as log:
            router = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=log, stderr=log
            )
        try:
            is_picker = "--endpoint-picker" in options  # without fronts a picker is never ready
            await _until_answers(f"{ports[2]}/started" if is_picker else f"{ports[0]}/ready")
            yield RouterProcess(router.pid, *ports, cluster, worker, router)
        finally:
            if router.returncode is None:
                router.terminate()
            await router.wait()
            await worker.stop()
            await redis.aclose()


async def _until_answers(place: str) -> None:
    async with asyncio.timeout(START_DEADLINE_S), httpx.AsyncClient(timeout=5) as http:
        while True:
            try:
                if (await http.get(f"http://127.0.0.1:{place}")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
