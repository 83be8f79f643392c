"""A drain with a long deadline: a newer, earlier one is kept, and its engine is still watched.

The worker is the only one that decodes, so that what is there cannot move away meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from tandem.cluster.operate import call_router
from tests.e2e.conftest import StartCluster
from tests.harness.client import complete_all, golden
from tests.harness.cluster import LocalCluster, WorkerProcess, wait_for

LONG_S = 600.0


@asynccontextmanager
async def hung_in_a_long_drain(
    cluster: LocalCluster, *options_of_the_next: str
) -> AsyncIterator[WorkerProcess]:
    """A decode worker that has a request, drains, and whose engine then stands still.

    At the end, when it is gone: the request goes on at the next worker, as if nothing had been.
    """
    (prompt,), (expected,) = golden(5)
    worker = cluster.workers["decode-0"]
    asking = asyncio.create_task(complete_all(cluster, [prompt], max_tokens=64))
    running = lambda: worker.state().load.num_running  # noqa: E731
    await asyncio.to_thread(wait_for, running, deadline_s=60, what="a request that decodes")
    (engine,) = psutil.Process(worker.process.pid).children()
    engine.suspend()
    path = f"/v1/cluster/workers/{worker.worker_id}/drain"
    call_router(cluster.admin_url, "POST", {"deadline_s": LONG_S, "force": True}, path=path)
    drains = lambda: cluster.records()["decode-0"]["state"] == "draining"  # noqa: E731
    await asyncio.to_thread(wait_for, drains, deadline_s=30, what="the drain")
    yield worker
    cluster.start_worker("decode-0", "decode", *options_of_the_next)  # as its agent would
    (answer,) = await asking
    assert answer.token_ids == expected


async def test_sigterm_in_a_long_drain_brings_its_own_deadline_and_a_hung_engine_ends_it(
    start_cluster: StartCluster,
) -> None:
    """Two workers in turn: one that is told, and one that is not."""
    with start_cluster("--prefill-at", "local", "--drain-deadline", "1", prefill=0) as cluster:
        async with hung_in_a_long_drain(cluster, "--engine-hang-timeout", "3") as worker:
            worker.process.terminate()
            assert await asyncio.to_thread(worker.process.wait, 30) == 0
            assert "s, so 1 sequences and 0 leases are aborted" in worker.log.read_text()
            assert "the engine made no progress for" not in worker.log.read_text()
        await asyncio.to_thread(cluster.wait_ready)
        async with hung_in_a_long_drain(cluster) as worker:
            assert await asyncio.to_thread(worker.process.wait, 30) == 1
            assert "the engine made no progress for" in worker.log.read_text()
