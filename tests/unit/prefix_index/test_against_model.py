"""Random logs of several workers: the implementations against a model that is not clever.

The replica is also compared after each change that is made between two of its reads, so that
changes meet a scan in every order.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.net.store.client import connect
from tandem.prefix_index.memory import MemoryIndex
from tandem.prefix_index.protocol import PrefixIndex
from tandem.prefix_index.redis import RedisIndex
from tests.harness.followed_index import SteppedShard, followed

pytestmark = pytest.mark.service

# A block is its path: ((), (0,), (0, 1), ...). Its parent is the path without the last step.
Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
WORKERS = st.sampled_from(["w0", "w1", "w2", "w3"])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), WORKERS, PATHS),
        st.tuples(st.just("store"), WORKERS, PATHS),
        st.tuples(st.just("remove"), WORKERS, PATHS),
        st.tuples(st.just("wrong number"), WORKERS, PATHS),
        st.tuples(st.just("wrong epoch"), WORKERS, PATHS),
        st.tuples(st.just("reset"), WORKERS, st.just(())),
        st.tuples(st.just("forget"), WORKERS, st.just(())),
        st.tuples(st.just("sweep"), WORKERS, st.just(())),
    ),
    max_size=30,
)


def prefixes(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


def hashes(paths: list[Path]) -> list[bytes]:
    return [blake2b(bytes(path), digest_size=16).digest() for path in paths]


class Model:
    def __init__(self) -> None:
        self.held: dict[str, set[Path]] = {}

    def match(self, path: Path) -> dict[str, int]:
        depths = {
            worker_id: sum(1 for _ in takewhile(held.__contains__, prefixes(path)))
            for worker_id, held in self.held.items()
        }
        return {worker_id: depth for worker_id, depth in depths.items() if depth}


class Driver:
    """Applies operations to an index and to the model, with a correct log for each worker."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.model = Model()
        self.epochs: dict[str, int] = {}
        self.numbers: dict[str, int] = {}

    async def apply(self, operation: str, worker_id: str, path: Path) -> None:
        held = self.model.held.get(worker_id, set())
        epoch, number = str(self.epochs.get(worker_id, 0)), self.numbers.get(worker_id, 0)
        new = [p for p in prefixes(path) if p not in held]
        gone = sorted((p for p in held if p[: len(path)] == path), key=len, reverse=True)
        known = worker_id in self.model.held
        match operation:
            case "store":
                assert await self._publish(worker_id, epoch, number, new, []) is known
                held.update(new if known else [])
            case "remove":
                assert await self._publish(worker_id, epoch, number, [], gone) is known
                held.difference_update(gone)
            case "wrong number":
                assert not await self._publish(worker_id, epoch, number + 1, new, [])
            case "wrong epoch":
                assert not await self._publish(worker_id, epoch + "x", number, [], gone)
            case "reset":
                self.epochs[worker_id] = int(epoch) + 1
                self.numbers[worker_id] = 0
                self.model.held[worker_id] = set()
                await self.index.reset(worker_id, str(int(epoch) + 1))
            case "forget":
                self.model.held.pop(worker_id, None)
                await self.index.forget(worker_id)
            case "sweep":
                await self.index.sweep(20_000)

    async def check(self, path: Path) -> None:
        assert await self.index.match(hashes(prefixes(path))) == self.model.match(path)
        for worker_id, held in self.model.held.items():
            assert await self.index.num_blocks(worker_id) == len(held)

    async def _publish(
        self, worker_id: str, epoch: str, number: int, stored: list[Path], removed: list[Path]
    ) -> bool:
        applied = await self.index.publish(
            worker_id, epoch, number, hashes(stored), hashes(removed)
        )
        if applied:
            self.numbers[worker_id] = number + 1
        return applied


async def follow(index: PrefixIndex, operations: list[tuple[str, str, Path]], probe: Path) -> None:
    driver = Driver(index)
    for worker_id in ("w0", "w1", "w2"):
        await driver.apply("reset", worker_id, ())
    for operation, worker_id, path in operations:
        await driver.apply(operation, worker_id, path)
        await driver.check(path or probe)
    await driver.check(probe)


@given(OPERATIONS, PATHS)
@settings(max_examples=100, deadline=None)
def test_memory_follows_the_model(operations: list[tuple[str, str, Path]], probe: Path) -> None:
    asyncio.run(follow(MemoryIndex(), operations, probe))


@given(OPERATIONS, PATHS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_redis_follows_the_model(
    redis_server: EmbeddedRedis, operations: list[tuple[str, str, Path]], probe: Path
) -> None:
    async def run() -> None:
        async with connect(redis_server.url) as redis:
            await follow(RedisIndex(redis, uuid.uuid4().hex), operations, probe)

    asyncio.run(run())


@given(OPERATIONS, PATHS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_replica_follows_the_model(
    redis_server: EmbeddedRedis, operations: list[tuple[str, str, Path]], probe: Path
) -> None:
    async def run() -> None:
        async with connect(redis_server.url) as redis, followed(redis, uuid.uuid4().hex) as index:
            await follow(index, operations, probe)
            assert index.replica.num_loads == 1

    asyncio.run(run())


STEPS = st.lists(st.sampled_from(["scan", "log", "reload", "sweep", "-", "-"]), max_size=30)


# A scan reads 65,536 buckets, so an example takes a few tenths of a second.
@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_a_replica_whose_reads_and_changes_alternate_follows_the_model(
    redis_server: EmbeddedRedis, examples: int
) -> None:
    @given(OPERATIONS, STEPS, PATHS)
    @settings(max_examples=examples)
    def check(operations: list[tuple[str, str, Path]], steps: list[str], probe: Path) -> None:
        asyncio.run(alternate(redis_server.url, operations, steps, probe))

    check()


async def alternate(
    url: str, operations: list[tuple[str, str, Path]], steps: list[str], probe: Path
) -> None:
    async with connect(url) as redis:
        cluster_id = uuid.uuid4().hex
        driver = Driver(RedisIndex(redis, cluster_id))
        replica = SteppedShard(redis, cluster_id)
        for worker_id in ("w0", "w1"):
            await driver.apply("reset", worker_id, ())
            await driver.apply("store", worker_id, (0, 1, 0, 1, 1))
        await replica.begin_load()
        reads: dict[str, Callable[[], Awaitable[None]]] = {
            "scan": replica.scan,
            "log": replica.read_log,
            "reload": replica.begin_load,
        }
        for at in range(max(len(operations), len(steps))):
            if at < len(operations):
                await driver.apply(*operations[at])
            step = steps[at] if at < len(steps) else "-"
            if step == "sweep":
                replica.shard.sweep(100)
            elif step in reads:
                await reads[step]()
        await replica.finish()
        for path in (probe, (0, 1, 0, 1, 1), *(path for _, _, path in operations)):
            found = replica.shard.match(hashes(prefixes(path)), closed=True)
            assert found == driver.model.match(path)
        for worker_id, held in driver.model.held.items():
            assert replica.shard.num_blocks(worker_id) == len(held)
