"""Workers change pools, come and go under load: nobody's answer is lost, or another one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from tandem.net.store.client import connect_blocking
from tests.chaos.asking import asking
from tests.e2e.conftest import StartCluster
from tests.harness.client import metric
from tests.harness.cluster import LocalCluster, free_port, wait_for

FLIP_MAX_S = 2.0  # of the long form, on a machine of its own
FLIP_BUSY_S = 10.0


async def flip(cluster: LocalCluster, worker_id: str, role: str) -> float:
    """Seconds until the router places by it."""
    started = time.monotonic()
    async with httpx.AsyncClient(timeout=15) as client:
        url = f"{cluster.admin_url}/v1/cluster/workers/{worker_id}/role"
        reply = await client.post(url, json={"role": role})
    assert reply.status_code == 200, reply.text
    await asyncio.to_thread(
        wait_for, lambda: cluster.records()[worker_id]["role"] == role, deadline_s=30, what="it"
    )
    return time.monotonic() - started


async def test_a_worker_comes_changes_pools_and_goes_under_load(
    start_cluster: StartCluster,
) -> None:
    with start_cluster("--local-prefill-max-tokens", "0", prefill=1, decode=1) as cluster:
        async with asking(cluster, 4) as now:
            added = cluster.start_worker("decode-1", "decode")
            await asyncio.to_thread(cluster.wait_ready, "decode-1")
            await now.more(4)
            seconds = [await flip(cluster, "decode-1", "prefill")]
            await now.more(4)
            added.kill()  # the loan outlives the process
            added = cluster.start_worker("decode-1", "decode")
            await asyncio.to_thread(cluster.wait_ready, "decode-1")
            record = cluster.records()["decode-1"]
            assert (record["role"], record["pool"]) == ("prefill", "decode")
            await now.more(4)
            for role in ("decode", "prefill"):
                seconds.append(await flip(cluster, "decode-1", role))
                await now.more(4)
            added.process.terminate()
            assert await asyncio.to_thread(added.process.wait, 40) == 0
            del cluster.workers["decode-1"]
            with closing(connect_blocking(cluster.redis.url)) as redis:
                assert not list(redis.scan_iter("*:role")), "a worker that ends in order keeps none"
        now.check()
        assert max(seconds) < FLIP_BUSY_S, seconds
        cluster.wait_idle()


@pytest.mark.slow
async def test_workers_of_both_pools_change_under_load_in_under_two_seconds(
    start_cluster: StartCluster,
) -> None:
    with start_cluster("--local-prefill-max-tokens", "0", prefill=1, decode=2) as cluster:
        async with asking(cluster, 6) as now:
            seconds = {}
            for worker_id, role in (
                ("decode-1", "prefill"),
                ("prefill-0", "decode"),
                ("decode-1", "decode"),  # no prefill pool: decode workers prefill
                ("prefill-0", "prefill"),
            ):
                seconds[worker_id, role] = await flip(cluster, worker_id, role)
                await now.more(8)
        assert now.check() >= 32
        assert max(seconds.values()) < FLIP_MAX_S, seconds
        cluster.wait_idle()


@pytest.mark.slow
async def test_generations_that_cannot_exchange_kv_serve_side_by_side(
    start_cluster: StartCluster,
) -> None:
    """One pool after the other is replaced by workers of another KV compatibility."""
    with start_cluster("--local-prefill-max-tokens", "0", prefill=1, decode=1) as cluster:
        async with asking(cluster, 4) as now:
            refused = cluster.start_worker("refused", "decode", "--block-size", "32")
            assert await asyncio.to_thread(refused.process.wait, 60) == 2
            del cluster.workers["refused"]
            upgrade = ("--block-size", "32", "--num-blocks", "200", "--generation", "b")
            for role in ("decode", "prefill"):
                cluster.start_worker(f"{role}-b", role, *upgrade)
                await asyncio.to_thread(wait_for, partial(is_ready, cluster, f"{role}-b"), **SOON)
                await now.more(8)
                if role == "decode":  # without it the old prefill worker has nobody to work for
                    served = cluster.records()["decode-0"]["load"]["step"]
                    await now.more(8)
                    assert cluster.records()["decode-0"]["load"]["step"] > served, "it went idle"
                pairs = {w: set(r["transports"]) for w, r in cluster.records().items()}
                assert not {peer for peer in pairs[f"{role}-b"] if not peer.endswith("-b")}
                assert not {peer for peer in pairs[f"{role}-0"] if peer.endswith("-b")}
                old = cluster.workers[f"{role}-0"]
                old.process.terminate()
                assert await asyncio.to_thread(old.process.wait, 40) == 0
                del cluster.workers[f"{role}-0"]
            await now.more(8)
        now.check()
        pulled = metric(cluster, "decode-b", "tandem_kv_blocks_pulled_total")
        assert pulled > 0, "the new pools work together"
        cluster.wait_idle()


SOON = {"deadline_s": 60.0, "what": "the new generation"}


def is_ready(cluster: LocalCluster, worker_id: str) -> bool:
    return cluster.is_ready(cluster.workers[worker_id])


@dataclass
class LaunchedCluster:
    """`tandem up`, with a pool controller, as far as clients of a load need to know it."""

    http_port: int
    grpc_port: int
    admin_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def records(self) -> dict[str, dict[str, object]]:
        state = httpx.get(f"{self.admin_url}/v1/cluster").json()
        return {w["worker_id"]: w for w in state["workers"]}

    def tandem(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "tandem.ops.cli", *arguments, "--url", self.admin_url]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def launched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LaunchedCluster]:
    ports = free_port(), free_port(), free_port()
    options = ["--port", str(ports[0]), "--grpc-port", str(ports[1]), "--numerics", "invariant"]
    options += ["--admin-port", str(ports[2]), "--admin-grpc-port", str(free_port())]
    command = [sys.executable, "-m", "tandem.ops.cli", "up", *options, "--num-blocks", "600"]
    command += getattr(request, "param", [])
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[2])

    def ready() -> bool:
        assert process.poll() is None, (tmp_path / "up.log").read_text()[-2000:]
        return "Ctrl-C stops" in (tmp_path / "up.log").read_text()

    with closing(LaunchedCluster(*ports, process)) as cluster:
        wait_for(ready, deadline_s=180, what="the launched cluster")
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_scaling_and_flips_under_32_streams_lose_nothing(
    launched: LaunchedCluster,
) -> None:
    """Prefill 1 -> 3 -> 1 and decode 1 -> 2 -> 1 by `tandem scale`, then flips, then to zero."""
    flips: list[float] = []
    async with asking(launched, 32) as now:
        for size in ("prefill=3", "decode=2"):
            await asyncio.to_thread(launched.tandem, "scale", size, "--deadline", "180")
            await now.more(32)
        for _ in range(3):
            for worker_id in ("prefill-1", "decode-1"):
                for _ in range(2):
                    told = await asyncio.to_thread(launched.tandem, "set-role", worker_id)
                    flips.append(float(told.rpartition("(")[2].removesuffix(" s)\n")))
                    await now.more(16)
        for size in ("prefill=1", "decode=1", "prefill=0", "prefill=1", "decode=0", "decode=1"):
            await asyncio.to_thread(launched.tandem, "scale", size, "--deadline", "180")
            if size != "decode=0":
                await now.more(16)
    print(json.dumps({"requests": now.check(), "flips_s": flips}))
    assert max(flips) < FLIP_MAX_S, flips


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launched", [["--autoscale", "on", "--autoscale-max", "2"]], indirect=True)
async def test_the_autoscaler_adds_workers_under_load(launched: LaunchedCluster) -> None:
    async with asking(launched, 24) as now:
        async with asyncio.timeout(200):
            while len(launched.records()) < 3:
                await now.more(8)
        await now.more(24)
        said = await asyncio.to_thread(launched.tandem, "status")
    assert now.check() > 0
    assert "autoscaler (mode on): prefill" in said
    print(said)
