from __future__ import annotations

import pytest

from tandem.engine.cache.pool.eviction import EvictionQueue


def test_pops_by_last_use() -> None:
    queue = EvictionQueue()
    for block_id, last_used in ((5, 3), (6, 1), (7, 2)):
        queue.add(block_id, (0.0, last_used))
    queue.discard(7)
    queue.discard(99)
    assert queue.block_ids() == {5, 6}
    assert [queue.pop(), queue.pop()] == [6, 5]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_block_used_again_counts_from_its_last_use() -> None:
    queue = EvictionQueue()
    queue.add(1, (0.0, 1))
    queue.add(2, (0.0, 2))
    queue.discard(1)
    queue.add(1, (0.0, 3))
    assert [queue.pop(), queue.pop()] == [2, 1]


def test_what_is_worth_less_goes_first() -> None:
    queue = EvictionQueue()
    queue.add(1, (2.0, 1))
    queue.add(2, (1.0, 9))
    queue.add(3, (1.0, 8))
    queue.add(3, (3.0, 8))  # it is worth more meanwhile
    assert [queue.pop(), queue.pop(), queue.pop()] == [2, 1, 3]


def test_memory_stays_bounded_when_blocks_come_and_go() -> None:
    queue = EvictionQueue()
    queue.add(0, (0.0, 0))
    for used in range(1, 10_000):
        queue.add(1, (0.0, used))
        queue.discard(1)
    assert len(queue._heap) < 200
    assert queue.pop() == 0
