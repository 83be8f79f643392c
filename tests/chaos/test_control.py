"""A cluster without Ray for a while, and a request that crashes its workers.

CHAOS_MODEL, CHAOS_KV_DTYPE and CHAOS_TENSOR_PARALLEL select another model, KV data type and number
of ranks, as in test_chaos.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import closing

import httpx
import pytest

from tests.chaos.asking import asking
from tests.chaos.checks import wait_nothing_held
from tests.chaos.load import Prompt, answered
from tests.harness.client import complete_all, golden
from tests.harness.cluster import wait_for
from tests.harness.kept_cluster import KeptCluster
from tests.harness.kv_form import KvForm
from tests.harness.poisoned_engine import POISON

FORM = KvForm.from_environment()
OPTIONS = ("--num-blocks", "400", "--prefill-at", "remote", *FORM.options)
RAY_DEAD_S = float(os.environ.get("RAY_DEAD_S", "300"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_requests_go_on_without_ray_and_a_fresh_head_has_control(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Meanwhile a worker is killed and a pool size is requested; the new head handles both,
    once."""
    folder = tmp_path_factory.mktemp("run")
    print(f"\nRay is dead for {RAY_DEAD_S:g} s, logs in {folder}")
    model = FORM.model(folder)
    kept = KeptCluster(folder, *OPTIONS, model=model, prefill=2, decode=1)
    with closing(kept.start()) as cluster:
        before = {w.worker_id: w.pid for w in cluster.workers.values()}
        routers = cluster.pids("router")
        async with asking(cluster, 4, FORM) as now:
            killed_at = time.monotonic()
            cluster.kill_head()
            while time.monotonic() < killed_at + RAY_DEAD_S / 2:
                await now.more(4)
            os.kill(before.pop("prefill-1"), signal.SIGKILL)
            while time.monotonic() < killed_at + RAY_DEAD_S:
                await now.more(4)
            assert dict(cluster.processes()) == dict.fromkeys(before, 1), "who started one?"
            cluster.scale(decode=2)
            num_without = len(now.load.outcomes)
            slowest_s = max(o.seconds for o in now.load.outcomes)

            began = time.monotonic()
            await asyncio.to_thread(cluster.start_head)
            await asyncio.to_thread(wait_for, lambda: has(cluster, 2, 2), **SOON)
            took_s = time.monotonic() - began
            await now.more(8)
            cluster.scale(prefill=1, decode=1)
            await asyncio.to_thread(wait_for, lambda: has(cluster, 1, 1), **SOON)
            await now.more(8)
        num_requests = now.check()
        assert {w.worker_id: w.pid for w in cluster.workers.values()} == before
        assert cluster.pids("router") == routers
        assert dict(cluster.processes()) == dict.fromkeys(before, 1)
        await asyncio.to_thread(wait_nothing_held, cluster, 30)
        print(
            f"{num_requests} requests, {num_without} of them before there was a fresh head, the "
            f"slowest of those {slowest_s:.1f} s; it had both pools whole after {took_s:.1f} s"
        )


SOON = {"deadline_s": 300.0, "what": "the sizes that were asked for"}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_lent_worker_keeps_its_role_over_a_crash_and_a_new_head(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    kept = KeptCluster(folder, *OPTIONS, model=FORM.model(folder), decode=2)
    with closing(kept.start()) as cluster:
        role = f"{cluster.admin_url}/v1/cluster/workers/decode-1/role"
        async with asking(cluster, 4, FORM) as now:
            async with httpx.AsyncClient(timeout=15) as client:
                (await client.post(role, json={"role": "prefill"})).raise_for_status()
            await now.more(8)
            cluster.kill_head()
            await asyncio.to_thread(cluster.start_head)
            await asyncio.to_thread(wait_for, cluster.is_whole, **SOON)
            lent = cluster.workers["decode-1"]
            assert lent.role == "prefill"
            os.kill(lent.pid, signal.SIGKILL)

            def is_back() -> bool:
                found = cluster.workers.get("decode-1")
                return found is not None and found.pid != lent.pid

            await asyncio.to_thread(wait_for, is_back, **SOON)
            assert cluster.workers["decode-1"].role == "prefill"
            await now.more(8)
            assert cluster.state()["pools"]["prefill"]["serving"] == 2
        now.check()
        await asyncio.to_thread(wait_nothing_held, cluster, 30)


def has(cluster: KeptCluster, prefill: int, decode: int) -> bool:
    pools = cluster.state()["pools"]
    wanted = (pools["prefill"]["wanted"], pools["decode"]["wanted"])
    return wanted == (prefill, decode) and cluster.is_whole()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_request_that_crashes_its_workers_ends_after_three_and_they_come_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    module = "tests.harness.poisoned_engine"
    kept = KeptCluster(folder, *OPTIONS, model=FORM.model(folder), decode=2, module=module)
    with closing(kept.start()) as cluster:
        (known,) = await answered(cluster, list(map(Prompt, *golden(5))), FORM)
        num_starts = cluster.starts().total()
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=240) as client:
            body = {"prompt": [*known.token_ids, POISON], "max_tokens": 8}
            answer = await client.post("/v1/completions", json=body)
        print(f"\nafter {time.monotonic() - began:.1f} s: {answer.status_code} {answer.text}")
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "worker_lost"
        assert "3 workers were lost while this request ran" in error["message"]

        await asyncio.to_thread(wait_for, lambda: crashed(cluster, num_starts), **AGAIN)
        (again,) = await complete_all(cluster, [known.token_ids], max_tokens=8)
        assert again.token_ids == known.expected[:8]
        assert cluster.starts().total() - num_starts == 3, "nobody else may have crashed"
        await asyncio.to_thread(wait_nothing_held, cluster, 30)


AGAIN = {"deadline_s": 300.0, "what": "the last of three that crashed"}


def crashed(cluster: KeptCluster, num_starts: int) -> bool:
    return cluster.starts().total() >= num_starts + 3 and cluster.is_whole()
