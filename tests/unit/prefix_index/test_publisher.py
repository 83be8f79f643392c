"""The publisher against the in-memory tree, made to refuse, to fail and to hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError

from tandem.prefix_index.memory import MemoryIndex
from tandem.prefix_index.publisher import Publisher, PublisherConfig
from tests.chains import chain
from tests.harness.waiting import eventually

QUICK = PublisherConfig(
    interval_s=0.001,
    heartbeat_s=0.02,
    batch_blocks=4,
    deadline_s=0.05,
    backoff_min_s=0.001,
    backoff_max_s=0.01,
)


def held_in(index: MemoryIndex) -> int:
    return index._logs["w"].num_blocks if "w" in index._logs else -1


class Unsteady(MemoryIndex):
    """A tree that can be out of reach or hang, and that keeps every batch it applied."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.hangs = False
        self.batches: list[tuple[list[bytes], list[bytes]]] = []
        self.completed: list[bool] = []  # `complete` of each batch

    async def reset(self, worker_id: str, epoch: str) -> None:
        await self._reach()
        await super().reset(worker_id, epoch)

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        *,
        complete: bool = False,
    ) -> bool:
        await self._reach()
        applied = await super().publish(worker_id, epoch, sequence_number, stored, removed)
        if applied and (stored or removed):
            self.batches.append((list(stored), list(removed)))
            self.completed.append(complete)
        return applied

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise ConnectionError("down")
        if self.hangs:
            await asyncio.Event().wait()


@pytest.fixture
def index() -> Unsteady:
    return Unsteady()


@pytest.fixture
async def publisher(index: Unsteady) -> AsyncIterator[Publisher]:
    publisher = Publisher(index, "w", "p", config=QUICK)
    publisher.start()
    yield publisher
    await publisher.aclose()


async def test_publishes_in_batches_parents_first(index: Unsteady, publisher: Publisher) -> None:
    blocks = chain("a", 10)
    publisher.add(blocks, [])
    assert publisher.lag == 10
    await eventually(lambda: publisher.in_step)
    assert [stored for stored, _ in index.batches] == [blocks[:4], blocks[4:8], blocks[8:]]
    assert index.completed == [False, False, True]
    assert await index.match(blocks) == {"w": 10}
    publisher.add([], blocks[:6:-1])
    await eventually(lambda: publisher.in_step)
    assert index.batches[3] == ([], [blocks[9], blocks[8], blocks[7]])
    assert await index.match(blocks) == {"w": 7}
    assert publisher.num_held == 7


async def test_changes_that_cancel_each_other_are_not_published(index: Unsteady) -> None:
    publisher = Publisher(index, "w", "p", config=QUICK)
    blocks = chain("a", 3)
    publisher.add(blocks, [])
    publisher.add([], blocks[::-1])
    assert publisher.lag == 0
    publisher.add(blocks[:1], [])
    assert publisher.lag == 1


async def test_a_lost_tree_is_found_when_idle_and_filled_again(
    index: Unsteady, publisher: Publisher
) -> None:
    blocks = chain("a", 9)
    publisher.add(blocks, [])
    await eventually(lambda: publisher.in_step)
    epoch = publisher.epoch
    await index.forget("w")
    await eventually(lambda: publisher.epoch != epoch and publisher.in_step)
    assert await index.match(blocks) == {"w": 9}


@pytest.mark.parametrize("how", ["down", "hangs"])
async def test_an_outage_neither_blocks_nor_loses(
    index: Unsteady, publisher: Publisher, how: str
) -> None:
    blocks = chain("a", 20)
    publisher.add(blocks[:5], [])
    await eventually(lambda: publisher.in_step)
    setattr(index, how, True)
    publisher.add(blocks[5:], [])
    await eventually(lambda: not publisher._in_step)
    publisher.add([], blocks[:10:-1])
    setattr(index, how, False)
    await eventually(lambda: publisher.in_step)
    assert await index.match(blocks) == {"w": 11}
    assert await index.num_blocks("w") == 11


async def test_a_batch_applied_without_an_answer_leads_to_a_new_epoch(
    index: Unsteady, publisher: Publisher
) -> None:
    blocks = chain("a", 3)
    publisher.add(blocks, [])
    await eventually(lambda: publisher.in_step)
    assert await index.publish("w", publisher.epoch, publisher._next_number, [], [])
    epoch = publisher.epoch
    publisher.add([], blocks[:1:-1])
    await eventually(lambda: publisher.epoch != epoch and publisher.in_step)
    assert await index.match(blocks) == {"w": 2}


async def test_each_log_has_a_new_epoch_that_is_told_before_it_begins(index: Unsteady) -> None:
    told: list[tuple[str, bool]] = []
    publisher = Publisher(
        index,
        "w",
        "1700-ab",
        config=QUICK,
        on_epoch=lambda epoch: told.append((epoch, "w" in index._logs)),
    )
    publisher.start()
    await eventually(lambda: publisher.in_step)
    await publisher.aclose()
    assert told == [("1700-ab:1", False)]


async def test_closing_forgets_the_worker_even_when_the_tree_hangs(index: Unsteady) -> None:
    publisher = Publisher(index, "w", "p", config=QUICK)
    publisher.start()
    publisher.add(chain("a", 3), [])
    await eventually(lambda: publisher.in_step)
    index.hangs = True
    publisher.add(chain("b", 3), [])
    await publisher.aclose()
    assert await index.match(chain("a", 3)) == {}


async def test_a_tree_without_changes_is_swept_rarely() -> None:
    index = Swept()
    publisher = Publisher(index, "w", "p", config=replace(QUICK, sweep_idle_s=60.0))
    publisher.start()
    await eventually(lambda: index.num_published > 5)
    assert index.num_sweeps == 1
    publisher.add(chain("a", 1), [])
    await eventually(lambda: index.num_sweeps == 2)
    index.is_left = True
    publisher.add(chain("b", 1), [])
    await eventually(lambda: index.num_sweeps > 5)
    await publisher.aclose()


class Swept(MemoryIndex):
    """A tree that counts calls. `is_left` is what `sweep` returns."""

    num_published = 0
    num_sweeps = 0
    is_left = False

    async def publish(self, *arguments: Any, **more: Any) -> bool:
        self.num_published += 1
        return await super().publish(*arguments, **more)

    async def sweep(self, limit: int) -> bool:
        self.num_sweeps += 1
        return self.is_left


# A step adds the next block of one of three chains, or removes its last; then perhaps the publisher
# runs for a while, or the tree is lost.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["grow", "grow", "shrink"]), st.sampled_from("....rl")
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_the_tree_converges_to_what_is_held(steps: list[tuple[int, str, str]]) -> None:
    asyncio.run(_converges(steps))


async def _converges(steps: list[tuple[int, str, str]]) -> None:
    index = Unsteady()
    publisher = Publisher(index, "w", "p", config=QUICK)
    publisher.start()
    chains = [chain(name, 40) for name in "abc"]
    lengths = [0, 0, 0]
    for which, change, then in steps:
        if change == "grow":
            publisher.add([chains[which][lengths[which]]], [])
            lengths[which] += 1
        elif lengths[which]:
            lengths[which] -= 1
            publisher.add([], [chains[which][lengths[which]]])
        if then == "r":
            for _ in range(3):
                await asyncio.sleep(0)
        if then == "l":
            await index.forget("w")
    # The batch after the loss may not have been sent yet: a heartbeat finds it.
    await eventually(lambda: publisher.in_step and held_in(index) == sum(lengths))
    for which in range(3):
        expected = {"w": lengths[which]} if lengths[which] else {}
        assert await index.match(chains[which]) == expected
    await publisher.aclose()


async def test_a_bug_does_not_end_publishing(index: Unsteady, publisher: Publisher) -> None:
    blocks = chain("a", 6)
    publisher.add(blocks[:3], [])
    await eventually(lambda: publisher.in_step)
    publish, broken = index.publish, iter(range(2))

    async def break_twice(*args: object, complete: bool) -> bool:
        if next(broken, None) is not None:
            raise ZeroDivisionError
        return await publish(*args, complete=complete)  # type: ignore[arg-type]

    index.publish = break_twice  # type: ignore[method-assign]
    publisher.add(blocks[3:], [])
    await eventually(lambda: publisher.in_step and publisher.num_logs == 3)
    assert await index.match(blocks) == {"w": 6}
    assert publisher.num_published == 3 + 6
