"""A worker's tiers are holders of their own in the tree."""

from __future__ import annotations

import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.worker import WorkerConfig
from tandem.errors import ConfigError
from tandem.prefix_index.holders import holder_of, source_of, with_shared_tiers, worker_of
from tandem.prefix_index.memory import MemoryIndex
from tests.unit.prefix_index.test_prefix_index import chain


def test_names() -> None:
    assert holder_of("w", "") == worker_of("w") == "w"
    assert holder_of("w", "disk") == "w#disk"
    assert worker_of("w#disk") == "w"


def test_what_one_worker_knows_of_the_store_counts_for_all() -> None:
    found = {"a": 9, "a#disk": 8, "a#store": 3, "b#store": 7}
    assert with_shared_tiers(found) == {**found, "#store": 7}
    assert with_shared_tiers({"a": 9, "a#disk": 8}) == {"a": 9, "a#disk": 8}
    assert (source_of("a", "store"), source_of("a", "disk")) == ("#store", "a#disk")


def test_a_workers_id_has_no_mark() -> None:
    with pytest.raises(ConfigError, match="'a#disk'; it must not contain '#'"):
        WorkerConfig(
            role="decode",
            worker_id="a#disk",
            engine=EngineConfig(model="m"),
            cluster=ClusterConfig("c", "redis://localhost", "t"),
        )


async def test_a_block_that_leaves_the_pool_stays_as_its_tiers() -> None:
    index, blocks = MemoryIndex(), chain("a", 8)
    disk = holder_of("w", "disk")
    for name, depth in (("w", 8), (disk, 6)):
        await index.reset(name, "1")
        assert await index.publish(name, "1", 0, blocks[:depth], [])
    assert await index.match(blocks) == {"w": 8, disk: 6}
    assert await index.publish("w", "1", 1, [], blocks[:1:-1])
    assert await index.match(blocks) == {"w": 2, disk: 6}
    assert await index.publish(disk, "1", 1, [], blocks[:3:-1])
    assert await index.match(blocks[4:]) == {}
    await index.forget("w")
    assert await index.match(blocks) == {disk: 4}
