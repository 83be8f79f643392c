"""The prefix tree while Redis is killed, emptied, set back, and while workers and routers go.

One cluster for all of it, on a Redis of its own; the tests run in the order in which they stand.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from redis import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tests.e2e.conftest import running_cluster
from tests.harness.client import complete, complete_all, golden, metric, metric_at, open_client
from tests.harness.cluster import LocalCluster, wait_for

PROBE = golden(6)[0][0]  # 487 tokens
BACK_WITHIN_S = 10.0
PLACEMENT = "x-tandem-placement"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def own(redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(redis, tmp_path_factory.mktemp("own"), decode=2) as cluster:
        yield cluster


@asynccontextmanager
async def under_load(cluster: LocalCluster) -> AsyncIterator[None]:
    """Four clients without a pause; each answer is 200 and the reference's own tokens."""
    prompts, expected = golden(1, 2, 3, 5)
    over = asyncio.Event()
    counts = [0] * len(prompts)

    async def client_of(n: int, client: httpx.AsyncClient) -> None:
        while not over.is_set():
            answer = await complete(client, prompts[n], max_tokens=6)
            assert answer.token_ids == expected[n][:6]
            counts[n] += 1

    async with open_client(cluster) as client:
        clients = [asyncio.create_task(client_of(n, client)) for n in range(len(prompts))]
        try:
            yield
        finally:
            before = list(counts)
            while not all(map(int.__gt__, counts, before)):
                assert not any(client.done() for client in clients)
                await asyncio.sleep(0.01)
            over.set()
            await asyncio.gather(*clients)


def placement_of(cluster: LocalCluster, prompt: list[int]) -> str:
    """Asks for one token; why it went where it did."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=body, headers={PLACEMENT: "1"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.headers[PLACEMENT]


def is_found(cluster: LocalCluster) -> bool:
    """Returns whether the lookup finds the probe's blocks. Without a hit, the reason of the
    placement is load alone."""
    return not placement_of(cluster, PROBE).startswith("load: ")


async def hits_are_back(cluster: LocalCluster) -> None:
    await asyncio.to_thread(
        wait_for, lambda: is_found(cluster), deadline_s=BACK_WITHIN_S, what="hits"
    )


def verify(cluster: LocalCluster) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.ops.cli", "index", "verify", "--all"]
    command += ["--url", cluster.admin_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def is_right(cluster: LocalCluster) -> bool:
    """Returns whether the tree has exactly the blocks that the workers hold."""
    url = f"{cluster.admin_url}/v1/cluster/index/verify"
    workers = httpx.post(url, json={"all": True}, timeout=60).json()["workers"]
    return all(worker["ok"] for worker in workers.values())


def test_verify_counts_what_differs_and_has_it_mended(
    own: LocalCluster, redis: EmbeddedRedis
) -> None:
    wait_for(lambda: is_found(own), deadline_s=BACK_WITHIN_S, what="published blocks")
    good = verify(own)
    assert good.returncode == 0, good.stdout + good.stderr
    assert len(re.findall(r"^(?:de|pre)\S+ +\d+ +0 +0 +ok *$", good.stdout, re.M)) == 3
    with Redis.from_url(redis.url) as client:
        state = f"{{tandem:{own.cluster_id}:0}}:prefix"
        mask = 1 << int(client.hget(state, "slot:prefill-0") or b"")
        buckets = list(client.scan_iter(f"{state}:b:*", count=5000))
        lost = 0
        for bucket in buckets:
            for field, value in client.hgetall(bucket).items():
                if int(value) & mask and lost < 3:
                    client.hdel(bucket, field)
                    lost += 1
        client.hset(f"{state}:b:zz", mapping={b"12345678": mask, b"87654321": mask})
    bad = verify(own)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert re.search(r"^prefill-0 +\d+ +3 +2 +differs *$", bad.stdout, re.M), bad.stdout
    assert "decode-0" in bad.stdout
    wait_for(lambda: is_right(own), deadline_s=BACK_WITHIN_S, what="mending")
    alarms = metric_at(
        own.admin_url, "tandem_prefix_index_alarms_total", worker="prefill-0", kind="audit"
    )
    assert alarms == 1
    assert metric(own, "prefill-0", "tandem_index_logs_total") >= 2
    assert metric(own, "prefill-0", "tandem_index_lag_blocks") == 0


async def test_redis_is_flushed_under_load(own: LocalCluster, redis: EmbeddedRedis) -> None:
    async with under_load(own):
        await hits_are_back(own)
        with Redis.from_url(redis.url) as client:
            client.flushall()
        await hits_are_back(own)


@pytest.mark.parametrize("outage_s", [3.0, pytest.param(30.0, marks=pytest.mark.slow)])
async def test_redis_is_down_under_load_and_comes_back_with_an_old_dump(
    own: LocalCluster, redis: EmbeddedRedis, outage_s: float
) -> None:
    dump = redis.log_path.parent / "dump.rdb"
    with Redis.from_url(redis.url) as client:
        client.save()
    old = shutil.move(dump, dump.with_suffix(".old"))
    async with under_load(own):  # publishes what the dump does not have
        # Nobody holds this any more when the dump says that it does.
        placement_of(own, [5] * 600)
        epochs = metric(own, "decode-0", "tandem_index_logs_total")
        redis.kill()
        await asyncio.sleep(outage_s)
        shutil.copy(old, dump)
        await asyncio.to_thread(redis.start)
        await hits_are_back(own)
    dump.unlink()

    def renewed() -> bool:
        return metric(own, "decode-0", "tandem_index_logs_total") > epochs

    await asyncio.to_thread(wait_for, renewed, deadline_s=10, what="a new epoch")
    await asyncio.to_thread(
        wait_for,
        lambda: is_right(own),
        deadline_s=BACK_WITHIN_S,
        what="a tree that is right",
    )


async def test_redis_is_killed_and_started_again_empty_under_load(
    own: LocalCluster, redis: EmbeddedRedis
) -> None:
    prompts, expected = golden(0, 1, 2, 3, 5)
    load = asyncio.create_task(complete_all(own, prompts * 3, max_tokens=24))
    redis.kill()
    during = await complete_all(own, prompts, max_tokens=24)
    redis.restart()
    answers = [*await load, *during, *await complete_all(own, prompts, max_tokens=24)]
    assert [a.token_ids for a in answers] == [tokens[:24] for tokens in expected] * 5
    await asyncio.to_thread(
        wait_for,
        lambda: is_found(own) and is_right(own),
        deadline_s=20,
        what="all blocks in the new tree",
    )
    await asyncio.to_thread(own.wait_ready)


def test_the_first_look_up_of_a_new_router_hits(own: LocalCluster) -> None:
    assert own.router is not None
    own.router.terminate()
    own.router.wait(30)
    own.start_router()
    own.wait_ready()
    wait_for(
        lambda: httpx.get(f"{own.url}/ready", timeout=5).status_code == 200,
        deadline_s=30,
        what="the model of the router",
    )
    assert is_found(own)
    assert metric_at(own.admin_url, "tandem_prefix_lookups_total", outcome="hit") == 1
    assert metric_at(own.admin_url, "tandem_prefix_lookups_total") == 1


def test_a_killed_worker_is_not_chosen_after_its_records_time_to_live(own: LocalCluster) -> None:
    starts = itertools.count(2000, 200)

    def placement_of_new_prompt() -> str:
        start = next(starts)
        return placement_of(own, list(range(start, start + 200)))

    # On a busy machine a decode worker's own prefill may look faster for a while.
    wait_for(
        lambda: "prefill=prefill-0" in placement_of_new_prompt(),
        deadline_s=30,
        what="a prompt for prefill-0",
    )
    own.workers.pop("prefill-0").kill()
    own.workers.pop("decode-1").kill()
    wait_for(lambda: set(own.records()) == {"decode-0"}, deadline_s=30, what="the end of both")
    for _ in range(6):
        reason = placement_of_new_prompt()
        assert "decode=decode-0 " in reason
        assert reason.endswith("prefill=none")
    assert "prefill-0" not in own.records()
    # What the killed ones had is known to Redis for a while, and to no placement: once decode-0
    # has computed the probe, all of it is found there.
    reason = placement_of(own, PROBE)
    assert "decode=decode-0 " in reason
    assert reason.endswith("prefill=none")
    wait_for(lambda: "cached=480" in placement_of(own, PROBE), deadline_s=10, what="the probe")
