"""Worker records and the KV compatibility in a real Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.common.perf_model.rates import PairRate, default_pair
from tandem.common.worker_load import WorkerLoad
from tandem.errors import Incompatible
from tandem.net.store.client import connect, connect_blocking
from tandem.net.store.pair_rates import read_pair_bandwidths
from tandem.net.store.registry import (
    LOAN_TTL_S,
    KvCompatibility,
    Registry,
    WorkerRecord,
)

pytestmark = pytest.mark.service

COMPATIBILITY = KvCompatibility(
    model_fingerprint="f" * 32,
    compute_dtype="bfloat16",
    numerics="fast",
    block_size=16,
    kv_dtype="bfloat16",
    layout="v1",
    hash_version=1,
)
WHILE_ALIVE = {"workers", "worker:w", "worker:w:pairs", "contract"}  # keys of one worker
OTHER = msgspec.structs.replace(COMPATIBILITY, block_size=32, kv_dtype="float32")


def a_record(worker_id: str, compatibility: KvCompatibility = COMPATIBILITY) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        epoch="17:1",
        role="decode",
        state="ready",
        address="127.0.0.1:4000",
        metrics_address="127.0.0.1:4001",
        host="here",
        pid=1,
        model="m",
        max_model_len=2048,
        compatibility=compatibility,
        load=WorkerLoad(num_running=3),
        pairs={"p0": PairRate("nixl", 1e-3, 1e9)},
    )


@pytest.fixture
def registry(redis_client: Redis, cluster_config: ClusterConfig) -> Registry:
    return Registry(redis_client, cluster_config)


@pytest.fixture
def brief(redis_client: Redis, cluster_config: ClusterConfig) -> Registry:
    """Its records live for 50 ms."""
    return Registry(redis_client, replace(cluster_config, record_ttl_s=0.05))


async def keys_of(redis: Redis, cluster_id: str) -> set[str]:
    return {k.decode().split("}:")[1] async for k in redis.scan_iter(f"*{cluster_id}*", count=9999)}


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_reads_what_was_written_by_worker_id(registry: Registry) -> None:
    assert await registry.read() == []
    await registry.write(a_record("w1"))
    await registry.write(a_record("w0"))
    changed = msgspec.structs.replace(a_record("w1"), state="draining", epoch="17:2")
    await registry.write(changed)
    assert await registry.read() == [a_record("w0"), changed]


async def test_a_controller_reads_measured_pairs_and_no_first_guesses(tmp_path: Path) -> None:
    pairs = {
        "prefill-0": PairRate("nixl", 1e-3, 5e9),
        "prefill-1": msgspec.structs.replace(default_pair("grpc"), reason="the other has no NIXL"),
        "prefill-2": PairRate("grpc", 1e-3, float("nan")),
        "prefill-3": PairRate("nixl", 2e-3, 1e12),  # the fit of small pulls on a busy host
    }
    measured = msgspec.structs.replace(a_record("decode-0"), pairs=pairs)
    names = ["decode-0", "prefill-0", "broken", "gone"]
    with EmbeddedRedis(tmp_path, cluster_id="c") as server:
        async with aclosing(connect(server.url_of("worker"))) as redis:
            registry = Registry(redis, ClusterConfig("c", server.url, "token"))
            for record in (measured, a_record("gone"), a_record("prefill-0")):
                await registry.write(record)
            await registry.remove("gone")
            await redis.set("{tandem:c}:worker:broken:pairs", b"\xc1")
        with closing(connect_blocking(server.url_of("controller"))) as controller:
            found = read_pair_bandwidths(controller, "c", names)
    assert {worker: list(pairs) for worker, pairs in found.items()} == {
        "decode-0": ["prefill-0", "prefill-3"],
        "prefill-0": ["p0"],
    }
    # 4 MiB take 1.84 and 2.00 ms
    assert found["decode-0"]["prefill-0"] == pytest.approx(2.28e9, rel=0.01)
    assert found["decode-0"]["prefill-3"] == pytest.approx(2.09e9, rel=0.01)


async def test_a_silent_worker_is_dead_and_its_id_is_dropped(
    registry: Registry, brief: Registry, redis_client: Redis, cluster_id: str
) -> None:
    await brief.write(a_record("silent"))
    await registry.write(a_record("alive"))

    async def is_gone() -> bool:
        return [r.worker_id for r in await registry.read()] == ["alive"]

    await eventually(is_gone)
    members = await redis_client.smembers(f"{{tandem:{cluster_id}}}:workers")  # type: ignore[misc]
    assert members == {b"alive"}


async def test_the_role_of_a_lent_worker_outlives_its_record_until_it_is_given_back(
    registry: Registry, redis_client: Redis, cluster_id: str
) -> None:
    assert await registry.read_loan("w") is None
    await registry.write(a_record("w"), "prefill")
    await registry.remove("w")
    assert await registry.read_loan("w") == "prefill"
    key = f"{{tandem:{cluster_id}}}:worker:w:role"
    assert 0 < await redis_client.pttl(key) <= LOAN_TTL_S * 1000
    await registry.write(a_record("w"))
    assert await registry.read_loan("w") is None
    await redis_client.set(key, b"a role of another version")
    assert await registry.read_loan("w") is None


async def test_nothing_is_left_of_a_cluster_that_died(
    registry: Registry, brief: Registry, redis_client: Redis, cluster_id: str
) -> None:
    await registry.check_compatibility(COMPATIBILITY)
    await registry.write(a_record("w"))
    assert await keys_of(redis_client, cluster_id) == WHILE_ALIVE
    await brief.write(a_record("w"))  # which is its last

    async def is_empty() -> bool:
        return not await keys_of(redis_client, cluster_id)

    await eventually(is_empty)
    await brief.check_compatibility(OTHER)


async def test_the_last_worker_that_leaves_takes_the_contract_with_it(
    registry: Registry, redis_client: Redis, cluster_id: str
) -> None:
    await registry.check_compatibility(COMPATIBILITY)
    for worker_id in ("w0", "w1"):
        await registry.write(a_record(worker_id))
    await registry.remove("w0")
    assert [r.worker_id for r in await registry.read()] == ["w1"]
    with pytest.raises(Incompatible):
        await registry.check_compatibility(OTHER)
    await registry.remove("w1")
    await registry.remove("never known")
    assert await keys_of(redis_client, cluster_id) == set()
    await registry.check_compatibility(OTHER)


async def test_a_contract_that_differs_is_refused_and_each_difference_named(
    registry: Registry,
) -> None:
    await registry.check_compatibility(COMPATIBILITY)
    await registry.check_compatibility(COMPATIBILITY)
    await registry.check_compatibility(msgspec.structs.replace(COMPATIBILITY, tensor_parallel=2))
    with pytest.raises(Incompatible) as caught:
        await registry.check_compatibility(OTHER)
    assert caught.value.message == (
        "this worker cannot join the cluster: its block_size is 32, not 16; "
        "its kv_dtype is 'float32', not 'bfloat16'. All workers of a cluster need the same model "
        "and the same KV options"
    )


async def test_another_generation_has_a_contract_of_its_own(registry: Registry) -> None:
    """Both are seen; within each of them workers must agree."""
    await registry.check_compatibility(COMPATIBILITY)
    await registry.write(a_record("old"))
    await registry.check_compatibility(OTHER, "b")
    new = msgspec.structs.replace(a_record("new", OTHER), generation="b")
    await registry.write(new)
    assert [r.worker_id for r in await registry.read()] == ["new", "old"]
    assert COMPATIBILITY.compatibility_key() != OTHER.compatibility_key()

    with pytest.raises(Incompatible):
        await registry.check_compatibility(COMPATIBILITY, "b")
    await registry.write(msgspec.structs.replace(a_record("lies"), generation="b"))
    assert [r.worker_id for r in await registry.read()] == ["new", "old"]


async def test_a_contract_of_another_version_is_refused(
    registry: Registry, redis_client: Redis, cluster_id: str
) -> None:
    await redis_client.set(f"{{tandem:{cluster_id}}}:contract", msgspec.msgpack.encode({"a": 1}))
    with pytest.raises(Incompatible, match="version of Tandem"):
        await registry.check_compatibility(COMPATIBILITY)


async def test_a_worker_of_another_contract_is_left_out_and_keeps_no_contract_alive(
    registry: Registry,
    redis_client: Redis,
    cluster_id: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = f"{{tandem:{cluster_id}}}:contract"
    await registry.write(a_record("w0"))
    await redis_client.pexpire(key, 60_000)
    await registry.write(a_record("w1", OTHER))
    assert await redis_client.pttl(key) > 30_000
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [r.worker_id for r in await registry.read()] == ["w0"]
    assert len(caplog.records) == 1
    assert "w1" in caplog.text
    assert "block_size is 32" in caplog.text


async def test_another_degree_of_tensor_parallelism_is_the_same_contract(
    registry: Registry,
) -> None:
    await registry.write(a_record("w0"))
    await registry.write(a_record("w1", msgspec.structs.replace(COMPATIBILITY, tensor_parallel=2)))
    assert [r.compatibility.tensor_parallel for r in await registry.read()] == [1, 2]


@pytest.mark.parametrize("value", [b"", b"\xc1", msgspec.msgpack.encode({"worker_id": "old"})])
async def test_a_record_of_another_schema_is_skipped_and_logged_once(
    registry: Registry,
    redis_client: Redis,
    cluster_id: str,
    caplog: pytest.LogCaptureFixture,
    value: bytes,
) -> None:
    await registry.write(a_record("new"))
    await redis_client.set(f"{{tandem:{cluster_id}}}:worker:old", value)
    await redis_client.sadd(f"{{tandem:{cluster_id}}}:workers", "old")  # type: ignore[misc]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [r.worker_id for r in await registry.read()] == ["new"]
    assert len(caplog.records) == 1
    await registry.write(a_record("old"))
    assert [r.worker_id for r in await registry.read()] == ["new", "old"]


async def test_fields_that_a_newer_version_adds_are_ignored(
    registry: Registry, redis_client: Redis, cluster_id: str
) -> None:
    await registry.write(a_record("w"))
    newer = msgspec.to_builtins(a_record("w")) | {"added_later": [1]}
    await redis_client.set(f"{{tandem:{cluster_id}}}:worker:w", msgspec.msgpack.encode(newer))
    assert await registry.read() == [a_record("w")]
