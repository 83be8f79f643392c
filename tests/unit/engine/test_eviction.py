from __future__ import annotations

import pytest

from tandem.engine.cache.eviction import LeastRecentlyUsed


def test_pops_by_last_use() -> None:
    policy = LeastRecentlyUsed()
    for block_id, last_used in ((5, 3), (6, 1), (7, 2)):
        policy.add(block_id, last_used)
    policy.discard(7)
    policy.discard(99)
    assert policy.block_ids() == {5, 6}
    assert [policy.pop(), policy.pop()] == [6, 5]
    with pytest.raises(IndexError):
        policy.pop()


def test_a_block_used_again_counts_from_its_last_use() -> None:
    policy = LeastRecentlyUsed()
    policy.add(1, 1)
    policy.add(2, 2)
    policy.discard(1)
    policy.add(1, 3)
    assert [policy.pop(), policy.pop()] == [2, 1]


def test_memory_stays_bounded_when_blocks_come_and_go() -> None:
    policy = LeastRecentlyUsed()
    policy.add(0, 0)
    for used in range(1, 10_000):
        policy.add(1, used)
        policy.discard(1)
    assert len(policy._heap) < 200
    assert policy.pop() == 0
