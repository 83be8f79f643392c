"""The behaviour suite: what every PrefixIndex does, on each implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tandem.net.store.client import connect
from tandem.prefix_index.memory import MemoryIndex
from tandem.prefix_index.protocol import PrefixIndex
from tandem.prefix_index.redis import RedisIndex
from tests.chains import chain
from tests.harness.followed_index import followed


@pytest.fixture(
    params=[
        "memory",
        pytest.param("redis", marks=pytest.mark.service),
        pytest.param("replica", marks=pytest.mark.service),
    ]
)
async def index(request: pytest.FixtureRequest, cluster_id: str) -> AsyncIterator[PrefixIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    async with connect(request.getfixturevalue("redis_url")) as redis:
        if request.param == "redis":
            yield RedisIndex(redis, cluster_id)
            return
        async with followed(redis, cluster_id) as index:
            yield index


async def hold(index: PrefixIndex, worker_id: str, hashes: list[bytes]) -> None:
    await index.reset(worker_id, "1")
    assert await index.publish(worker_id, "1", 0, hashes, [])


async def test_an_empty_tree_matches_nothing(index: PrefixIndex) -> None:
    assert await index.match(chain("a", 5)) == {}
    assert await index.match([]) == {}
    assert await index.num_blocks("w") == 0


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 100])
async def test_depth_is_the_number_of_leading_blocks_held(index: PrefixIndex, length: int) -> None:
    blocks = chain("a", 100)
    await hold(index, "w", blocks[:length])
    assert await index.match(blocks) == {"w": length}
    assert await index.match(blocks[:length]) == {"w": length}
    assert await index.match(blocks[: length - 1]) == ({"w": length - 1} if length > 1 else {})
    assert await index.num_blocks("w") == length


async def test_without_closure_the_deepest_entry_of_each_worker_counts(index: PrefixIndex) -> None:
    """Entries of a model with windows are depths that can be resumed, in any order, with gaps."""
    blocks = chain("a", 40)
    await hold(index, "gaps", [blocks[30], blocks[2], blocks[7]])
    await hold(index, "one", [blocks[7]])
    await hold(index, "other", chain("b", 3))
    assert await index.match(blocks, closed=False) == {"gaps": 31, "one": 8}
    assert await index.match(blocks[:30], closed=False) == {"gaps": 8, "one": 8}
    assert await index.match(blocks[:7], closed=False) == {"gaps": 3}
    assert await index.match([], closed=False) == {}
    assert await index.publish("gaps", "1", 1, [], [blocks[30], blocks[7]])
    assert await index.match(blocks, closed=False) == {"gaps": 3, "one": 8}


async def test_each_worker_has_its_own_depth(index: PrefixIndex) -> None:
    blocks = chain("a", 64)
    depths = {"w1": 1, "w5": 5, "w32": 32, "w33": 33, "w64": 64, "other5": 5}
    for worker_id, depth in depths.items():
        await hold(index, worker_id, blocks[:depth])
    await hold(index, "none", chain("b", 10))
    assert await index.match(blocks) == depths


async def test_chains_that_part_are_told_apart(index: PrefixIndex) -> None:
    shared = chain("shared", 10)
    left, right = shared + chain("left", 10), shared + chain("right", 10)
    await hold(index, "left", left)
    await hold(index, "right", right)
    assert await index.match(left) == {"left": 20, "right": 10}
    assert await index.match(right) == {"left": 10, "right": 20}


async def test_removed_blocks_match_no_more(index: PrefixIndex) -> None:
    blocks = chain("a", 10)
    await hold(index, "w", blocks)
    await hold(index, "x", blocks)
    assert await index.publish("w", "1", 1, [], blocks[:3:-1])
    assert await index.match(blocks) == {"w": 4, "x": 10}
    assert await index.num_blocks("w") == 4
    assert await index.publish("w", "1", 2, [], blocks[3::-1])
    assert await index.match(blocks) == {"x": 10}


async def test_one_batch_stores_then_removes(index: PrefixIndex) -> None:
    old, new = chain("old", 4), chain("new", 6)
    await hold(index, "w", old)
    assert await index.publish("w", "1", 1, new, old[::-1])
    assert await index.match(old) == {}
    assert await index.match(new) == {"w": 6}
    assert await index.num_blocks("w") == 6


async def test_a_block_stored_twice_or_removed_unheld_counts_once(index: PrefixIndex) -> None:
    blocks = chain("a", 4)
    await hold(index, "w", blocks)
    assert await index.publish("w", "1", 1, blocks, chain("never held", 2))
    assert await index.num_blocks("w") == 4
    assert await index.match(blocks) == {"w": 4}


async def test_an_empty_batch_takes_a_number(index: PrefixIndex) -> None:
    await hold(index, "w", [])
    assert await index.publish("w", "1", 1, [], [])
    assert not await index.publish("w", "1", 1, [], [])
    assert await index.publish("w", "1", 2, [], [])


@pytest.mark.parametrize("number", [0, 2, 7])
async def test_a_repeat_or_a_gap_changes_nothing(index: PrefixIndex, number: int) -> None:
    blocks = chain("a", 8)
    await hold(index, "w", blocks[:4])
    assert not await index.publish("w", "1", number, blocks[4:], [])
    assert not await index.publish("w", "1", number, [], blocks[3::-1])
    assert await index.match(blocks) == {"w": 4}
    assert await index.publish("w", "1", 1, blocks[4:], [])
    assert await index.match(blocks) == {"w": 8}


async def test_another_epoch_changes_nothing(index: PrefixIndex) -> None:
    blocks = chain("a", 8)
    await hold(index, "w", blocks[:4])
    assert not await index.publish("w", "2", 1, blocks[4:], [])
    assert await index.match(blocks) == {"w": 4}


async def test_a_worker_without_a_log_publishes_nothing(index: PrefixIndex) -> None:
    assert not await index.publish("w", "1", 0, chain("a", 3), [])
    assert await index.match(chain("a", 3)) == {}
    assert await index.num_blocks("w") == 0


async def test_reset_forgets_and_starts_again(index: PrefixIndex) -> None:
    blocks = chain("a", 8)
    await hold(index, "w", blocks)
    await hold(index, "x", blocks[:2])
    await index.reset("w", "2")
    assert await index.match(blocks) == {"x": 2}
    assert await index.num_blocks("w") == 0
    assert not await index.publish("w", "1", 1, blocks, [])
    assert await index.publish("w", "2", 0, blocks[:5], [])
    assert await index.match(blocks) == {"w": 5, "x": 2}
    assert await index.num_blocks("w") == 5


async def test_a_forgotten_worker_matches_only_after_a_reset(index: PrefixIndex) -> None:
    blocks = chain("a", 8)
    await hold(index, "w", blocks)
    await hold(index, "x", blocks[:2])
    await index.forget("w")
    await index.forget("never known")
    assert await index.match(blocks) == {"x": 2}
    assert not await index.publish("w", "1", 1, [], [])
    await index.reset("w", "2")
    assert await index.match(blocks) == {"x": 2}


async def test_more_resets_and_workers_than_one_shard_has_slots(index: PrefixIndex) -> None:
    blocks = chain("a", 80)
    for epoch in range(40):
        await index.reset("w", str(epoch))
        assert await index.publish("w", str(epoch), 0, blocks[: epoch + 1], [])
    assert await index.match(blocks[:50]) == {"w": 40}
    for i in range(70):
        await hold(index, f"w{i}", blocks[: i + 1])
    everyone = {f"w{i}": i + 1 for i in range(70)} | {"w": 40}
    assert await index.match(blocks) == everyone
    for i in range(0, 70, 2):
        await index.forget(f"w{i}")
    assert await index.match(blocks) == {
        w: depth for w, depth in everyone.items() if w == "w" or depth % 2 == 0
    }


async def test_sweeping_changes_no_match_and_ends(index: PrefixIndex) -> None:
    blocks = chain("a", 50)
    await hold(index, "w", blocks)
    await hold(index, "x", blocks[:20])
    await index.forget("w")
    rounds = 0
    while await index.sweep(5000):
        rounds += 1
        assert await index.match(blocks) == {"x": 20}
        assert rounds < 100
    assert await index.num_blocks("x") == 20
    assert not await index.sweep(5000)
