"""A worker that loads is a row before it has a record, with real processes and a real Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig, WorkerRole
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.process.cancellation import cancel
from tandem.net.store.registry import LoadingNotice, Registry
from tandem.router.workers.cluster_view import ClusterView
from tandem.worker.encode.servicer import EncodeServicer
from tandem.worker.encode.worker import EncodeWorker
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.lifecycle.loading import tell_failed, tell_loading
from tandem.worker.lifecycle.servicer import Servicer
from tandem.worker.lifecycle.worker import Worker
from tests.harness.waiting import eventually
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.service


def config(cluster: ClusterConfig, model: str = "m") -> WorkerConfig:
    return WorkerConfig(
        role="decode",
        cluster=cluster,
        engine=EngineConfig(model=model, kv_bytes_max=1 << 20, max_model_len=64),
        transfer=TransferConfig(),
        worker_id="decode-7",
    )


async def test_a_router_sees_how_far_it_is_until_it_ends(
    redis_client: Redis, cluster_config: ClusterConfig
) -> None:
    view = ClusterView(cluster_config, redis_client)
    registry = Registry(redis_client, cluster_config)
    progress = [(1, 4)]
    telling = asyncio.create_task(tell_loading(config(cluster_config), lambda: progress[-1]))
    async with asyncio.timeout(10):
        while notices(view) != {"decode-7": LoadingNotice("decode", 1, 4, view_writes(view))}:
            await view._poll(registry)
        progress.append((3, 4))
        while notices(view)["decode-7"].num_bytes != 3:
            await view._poll(registry)
    await cancel(telling)
    await view._poll(registry)
    assert view.loading == {}


async def test_a_worker_that_failed_leaves_a_notice_of_why(
    redis_client: Redis, cluster_config: ClusterConfig
) -> None:
    view = ClusterView(cluster_config, redis_client)
    await tell_failed(config(cluster_config), "its model is another one")
    await view._poll(Registry(redis_client, cluster_config))
    view._note_problems()
    (row,) = view.problems.rows
    assert (row.worker_id, row.state, row.note) == (
        "decode-7",
        "failed",
        "its model is another one",
    )


def notices(view: ClusterView) -> dict[str, LoadingNotice]:
    return {name: told.notice for name, told in view.loading.items()}


def view_writes(view: ClusterView) -> int:
    return notices(view)["decode-7"].num_writes if view.loading else 0


async def test_redis_that_is_away_stops_no_start(tmp_path: Path) -> None:
    cluster = ClusterConfig("c", f"unix://{tmp_path}/no-redis", "a-token-for-tests")
    telling = asyncio.create_task(tell_loading(config(cluster), lambda: (0, 0)))
    await asyncio.sleep(0.2)
    assert not telling.done()
    async with asyncio.timeout(5):
        await cancel(telling)


async def test_the_engine_process_tells_its_progress(
    tmp_path: Path, cluster_config: ClusterConfig
) -> None:
    folder, _ = make_tiny_model("llama", tmp_path)
    num_bytes = sum(file.stat().st_size for file in folder.weight_files)
    link = EngineLink(config(cluster_config, str(tmp_path)), "1")
    try:
        assert link.loading == (0, 0)
        await link.start()
        # The progress has a socket of its own, so its last message may come after the start.
        await eventually(lambda: link.loading[0] > 0.99 * num_bytes)
    finally:
        await link.stop()
    loaded, of = link.loading
    assert of == num_bytes
    assert loaded <= num_bytes


class InstantEncodeWorker(EncodeWorker):
    """Has a tower that takes no time to load."""

    def _load(self) -> Any:
        return SimpleNamespace(fingerprint="m"), SimpleNamespace(encode=None)


@pytest.mark.parametrize("role", ["decode", "encode"])
async def test_a_worker_is_ready_once_it_has_joined(role: WorkerRole, tmp_path: Path) -> None:
    """While Redis is away, no router can find the worker."""
    make_tiny_model("llama", tmp_path)
    with EmbeddedRedis(tmp_path / "redis") as redis:
        cluster = ClusterConfig("c", redis.url, "a-token-for-tests", record_interval_s=0.2)
        redis.kill()
        of_worker = replace(config(cluster, str(tmp_path)), role=role)
        worker: Worker | EncodeWorker = (
            InstantEncodeWorker(of_worker, EncodeServicer)
            if role == "encode"
            else Worker(of_worker, Servicer)
        )
        running = asyncio.create_task(worker.run())
        try:
            await eventually(
                lambda: bool(worker._metrics_address) or running.done(), deadline_s=240
            )
            url = f"http://{worker._metrics_address}/ready"
            async with httpx.AsyncClient() as http:
                for _ in range(3):
                    answer = await http.get(url)
                    assert (answer.status_code, running.done()) == (503, False), answer.text
                    await asyncio.sleep(0.2)
                redis.restart()
                async with asyncio.timeout(60):
                    while (await http.get(url)).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                worker.stop(0.0)
                await running
        finally:
            await cancel(running)
