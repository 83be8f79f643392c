"""A worker whose entries in the prefix tree lie, or whose publisher is cut off, is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from prometheus_client import generate_latest

from tandem.common.block_hash import hash_blocks
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.client import Client, connect
from tandem.prefix_index.audit import Differences
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tandem.prefix_index.redis import RedisIndex
from tandem.router.index.trust import RENEWAL_S
from tandem.router.placement.reasons import PLACEMENT_HEADER
from tandem.router.workers.known_worker import KnownWorker
from tests.harness.scripted_worker import compatibility, saying
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]
QUICK = PublisherConfig(interval_s=0.002, heartbeat_s=0.05)


@pytest_asyncio.fixture(loop_scope="module")
async def redis(router: RunningRouter) -> AsyncIterator[Client]:
    async with connect(router.router.view.cluster.redis_url) as client:
        yield client


@pytest.fixture(autouse=True)
def calm(router: RunningRouter) -> None:
    """No alarm of an earlier test holds up one of this test."""
    audit = router.router.first.audit
    audit._trust._alarmed_at.clear()
    audit._trust._watch.keep(())
    audit._tree.looks = 2
    audit._tree.pause_s = 0.05
    audit._rounds_silent.clear()
    audit._clean.clear()
    audit._metrics.alarms.clear()
    for worker in router.workers:
        worker.block_hashes = None


def alarms(router: RunningRouter, worker_id: str, kind: str) -> float:
    counter = router.router.first.audit._metrics.alarms
    return counter.labels(worker=worker_id, kind=kind)._value.get()


def metric(router: RunningRouter, name: str) -> float:
    """The one sample of this name."""
    value = router.router._metrics.registry.get_sample_value(name)
    assert value is not None, name
    return value


async def soon(probe: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await probe():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def blocks_of(router: RunningRouter, prompt: list[int]) -> list[bytes]:
    root = compatibility(router.router.view.model_fingerprint).chain_root()
    return hash_blocks(root, prompt, 16)


async def ask(router: RunningRouter, prompt: list[int]) -> int:
    answer = await router.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1}
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_router_looks_prompts_up_in_its_replica(
    router: RunningRouter, redis: Client
) -> None:
    index = RedisIndex(redis, router.router.view.cluster.cluster_id)
    registry = router.router._metrics.registry

    def num_lookups(source: str) -> float:
        name = "tandem_prefix_replica_lookups_total"
        return registry.get_sample_value(name, {"source": source}) or 0.0

    replica = router.router._index.replica
    prompt = list(range(3000, 3400))
    blocks = blocks_of(router, prompt)
    router.script(saying([7], cached_tokens=384))
    await index.reset("decode-0", "q:1")
    assert await index.publish("decode-0", "q:1", 0, blocks, [])
    try:
        await eventually(lambda: replica.match(blocks, closed=True) == {"decode-0": len(blocks)})
        before, asked = num_lookups("replica"), num_lookups("redis")
        assert await ask(router, prompt) == 384
        assert num_lookups("replica") > before
        assert num_lookups("redis") == asked
        assert metric(router, "tandem_prefix_replica_entries") >= len(blocks)
        assert metric(router, "tandem_prefix_replica_silent_seconds") < 5
        assert metric(router, "tandem_prefix_replica_delay_seconds_count") >= 2
    finally:
        await index.forget("decode-0")


async def test_promised_hits_that_do_not_come_end_the_trust_until_all_is_published_anew(
    router: RunningRouter, redis: Client, caplog: pytest.LogCaptureFixture
) -> None:
    index = RedisIndex(redis, router.router.view.cluster.cluster_id)
    prompt = list(range(1000, 1400))
    blocks = blocks_of(router, prompt)
    publisher = Publisher(index, "decode-0", "p", config=QUICK)
    publisher.add(blocks, [])
    publisher.start()
    try:
        replica = router.router._index.replica
        await eventually(lambda: replica.match(blocks, closed=True) == {"decode-0": 25})
        router.script(saying([7], cached_tokens=384))
        predicted = metric(router, "tandem_prefix_tokens_predicted_total")
        found = metric(router, "tandem_prefix_tokens_found_total")
        for _ in range(6):
            assert await ask(router, prompt) == 384
        kept = 384 * len(router.workers[0].submitted)
        assert kept
        assert metric(router, "tandem_prefix_tokens_predicted_total") == predicted + kept
        assert metric(router, "tandem_prefix_tokens_found_total") == found + kept
        assert alarms(router, "decode-0", "hits") == 0

        router.script(saying([7]))  # the worker lost all of it, and its publisher says nothing
        epoch = publisher.epoch
        with caplog.at_level(logging.WARNING):
            for _ in range(60):
                if not alarms(router, "decode-0", "hits"):
                    await ask(router, prompt)
        assert alarms(router, "decode-0", "hits") == 1
        assert alarms(router, "decode-1", "hits") == 0
        assert "it must publish all its KV blocks again" in caplog.text

        await eventually(lambda: publisher.epoch != epoch and publisher.in_step)
        assert await index.match(blocks) == {"decode-0": 25}
    finally:
        await publisher.aclose()


async def test_entries_of_a_worker_that_is_not_trusted_do_not_attract(
    router: RunningRouter, redis: Client
) -> None:
    index = RedisIndex(redis, router.router.view.cluster.cluster_id)
    prompt = list(range(3000, 3400))
    blocks = blocks_of(router, prompt)
    await index.reset("decode-1", "cut off")  # nobody lives behind this log
    assert await index.publish("decode-1", "cut off", 0, blocks, [])
    replica = router.router._index.replica
    await eventually(lambda: replica.match(blocks, closed=True) == {"decode-1": len(blocks)})
    router.script(saying([7]))
    for _ in range(60):
        if not alarms(router, "decode-1", "hits"):
            await ask(router, prompt)
    assert len(router.workers[1].submitted) == 4

    async def forgotten() -> bool:
        return await index.match(blocks) == {}

    await soon(forgotten)
    assert alarms(router, "decode-1", "hits") == 1
    answer = await router.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 1},
        headers={PLACEMENT_HEADER: "1"},
    )
    assert answer.headers[PLACEMENT_HEADER].startswith("load: ")
    assert "cached=0/400" in answer.headers[PLACEMENT_HEADER]


async def test_a_log_that_stands_still_is_an_alarm(router: RunningRouter, redis: Client) -> None:
    audit = router.router.first.audit
    cluster_id = router.router.view.cluster.cluster_id
    index = RedisIndex(redis, cluster_id)
    for worker in router.workers:
        await index.reset(worker.worker_id, "cut off")
    assert await index.publish("decode-0", "cut off", 0, blocks_of(router, list(range(48))), [])
    await audit._round()
    assert alarms(router, "decode-0", "silent") == 0
    slot = (await index.find("decode-0") or (0, 0))[1]
    await redis.hincrby(index.key(0), f"seen:{slot}", -11)  # type: ignore[misc]
    for _ in range(2):  # as long may a worker be silent that comes back from a cut
        await audit._round()
        assert alarms(router, "decode-0", "silent") == 0
    await audit._round()
    assert alarms(router, "decode-0", "silent") == 1

    async def forgotten() -> bool:
        return await index.find("decode-0") is None

    await soon(forgotten)
    text = generate_latest(router.router._metrics.registry).decode()
    assert 'tandem_prefix_index_worker_silent_seconds{worker="decode-0"} 1' in text  # 11 or 12
    # One alarm is enough until the worker had the time to publish.
    for _ in range(3):
        await audit._round()
    assert alarms(router, "decode-0", "silent") == 1
    audit._trust._alarmed_at["decode-0"] -= RENEWAL_S
    await audit._round()
    assert alarms(router, "decode-0", "silent") == 2  # it has no log at all


async def test_the_tree_is_compared_with_what_a_worker_says(
    router: RunningRouter, redis: Client
) -> None:
    index = RedisIndex(redis, router.router.view.cluster.cluster_id)
    prompt = list(range(5000, 5400))
    blocks = blocks_of(router, prompt)
    for worker in router.workers:
        await index.reset(worker.worker_id, "1")
        assert await index.publish(worker.worker_id, "1", 0, blocks[:20], [])
    router.workers[0].block_hashes = blocks[:20]
    router.workers[1].block_hashes = blocks[3:24]

    answer = await router.admin.post("/v1/cluster/index/verify", json={"all": True})
    same = {"in_tree": True, "error": ""}
    assert answer.json()["workers"] == {
        "decode-0": {"checked": 20, "missing": 0, "stale": 0, "ok": True, **same},
        "decode-1": {"checked": 24, "missing": 4, "stale": 3, "ok": False, **same},
    }
    assert alarms(router, "decode-1", "audit") == 1

    async def forgotten() -> bool:
        return await index.match(blocks) == {"decode-0": 20}

    await soon(forgotten)
    sample = await router.admin.post("/v1/cluster/index/verify", json={})
    assert sample.json()["workers"]["decode-0"]["ok"]
    assert not sample.json()["workers"]["decode-1"]["in_tree"]
    refused = await router.admin.post("/v1/cluster/index/verify", json={"all": 1})
    assert refused.status_code == 400
    assert '{"all": true}' in refused.json()["error"]["message"]
    both = await asyncio.gather(
        *(router.admin.post("/v1/cluster/index/verify", json={"all": True}) for _ in range(2))
    )
    assert sorted(answer.status_code for answer in both) == [200, 429]


async def test_what_has_not_changed_is_compared_rarely(
    router: RunningRouter, redis: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = router.router.first.audit
    index = RedisIndex(redis, router.router.view.cluster.cluster_id)
    blocks = blocks_of(router, list(range(7000, 7400)))
    for worker in router.workers:
        await index.reset(worker.worker_id, "1")
        assert await index.publish(worker.worker_id, "1", 0, blocks[:20], [])
        worker.block_hashes = blocks[:20]
    ids = sorted(worker.worker_id for worker in router.workers)
    compare = audit._compare
    compared: list[str] = []

    async def noted(worker: KnownWorker, sample: int | None) -> Differences:
        compared.append(worker.record.worker_id)
        return await compare(worker, sample)

    monkeypatch.setattr(audit, "_compare", noted)

    async def compared_in_rounds() -> list[str]:
        compared.clear()
        for _ in range(2 * len(ids)):
            await audit._round()
        return sorted(compared)

    assert await compared_in_rounds() == ids
    assert await compared_in_rounds() == []
    router.workers[0].block_hashes = blocks[:21]
    assert await index.publish(router.workers[0].worker_id, "1", 1, blocks[20:21], [])
    assert await compared_in_rounds() == ids
    monkeypatch.setattr("tandem.router.index.audit.UNCHANGED_S", 0.0)
    assert len(await compared_in_rounds()) >= 2 * len(ids)  # the router's own rounds count, too


async def test_a_worker_that_cannot_be_asked_is_named(router: RunningRouter) -> None:
    router.workers[0].block_hashes = None  # an older worker has no such call
    answer = await router.admin.post("/v1/cluster/index/verify", json={})
    assert "UNIMPLEMENTED" in answer.json()["workers"]["decode-0"]["error"]
    assert pb.ListBlocksRequest.DESCRIPTOR.name == "ListBlocksRequest"
