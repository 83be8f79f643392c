"""Exact block ids, events in their order, and nothing shared that may still be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.block_hash import hash_blocks
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool, Reservation
from tandem.engine.types import StoredBlock

ROOT = b"root of 16 bytes"


def chain(*tokens: int) -> list[bytes]:
    """Hashes of a chain of blocks of one token."""
    return hash_blocks(ROOT, tokens, 1)


def hold(pool: BlockPool, hashes: list[bytes], num_blocks: int | None = None) -> list[int]:
    """A table whose blocks are all stored under `hashes` (plus own ones behind them)."""
    reservation = pool.reserve(hashes, num_blocks or len(hashes))
    assert reservation is not None
    table = reservation.block_table
    for i in range(reservation.num_cached_blocks, len(hashes)):
        table[i] = pool.store(
            table[i],
            parent_id=table[i - 1] if i else None,
            parent_hash=hashes[i - 1] if i else ROOT,
            block_hash=hashes[i],
        )
    return table


def test_allocates_lowest_first_and_the_freed_ones_again() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    pool.release([0, 1, 2])
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used, pool.num_cached) == (0, 4, 0)
    pool.check_integrity([[0, 1, 2, 3]])


def test_reserve_shares_the_cached_prefix_and_allocates_the_rest() -> None:
    pool = BlockPool(6)
    a = hold(pool, chain(1, 2), 3)
    assert a == [0, 1, 2]
    assert pool.reserve(chain(1, 2, 9), 4) == Reservation([0, 1, 3, 4], 2)
    pool.check_integrity([a, [0, 1, 3, 4]])
    assert pool.match(chain(1, 9)) == [0]
    assert pool.match(chain(9)) == []


def test_dropping_what_is_cached_leaves_what_is_used() -> None:
    pool = BlockPool(6)
    used = hold(pool, chain(1, 2))
    pool.release(hold(pool, chain(1, 2, 3, 4)))
    pool.release(hold(pool, chain(9)))
    pool.take_events()
    assert (pool.num_cached, pool.drop_cached()) == (3, 3)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (4, 2, 0)
    assert pool.match(chain(1, 2, 3, 4)) == used
    assert pool.match(chain(9)) == []
    stored, removed = pool.take_events()
    assert stored == []
    assert sorted(removed) == sorted([*chain(1, 2, 3, 4)[2:], *chain(9)])
    assert removed.index(chain(1, 2, 3, 4)[3]) < removed.index(chain(1, 2, 3, 4)[2])
    pool.check_integrity([used])
    assert pool.drop_cached() == 0


def test_what_was_stored_and_dropped_since_the_last_events_is_none() -> None:
    pool = BlockPool(4)
    pool.release(hold(pool, chain(1, 2)))
    assert pool.drop_cached() == 2
    assert pool.take_events() == ([], [])
    assert pool.allocate(4) is not None


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.release(hold(pool, chain(1, 2)))
    lent = pool.allocate(1)
    assert lent is not None
    # 3 blocks are to be had, two of them the prefix itself: they cannot serve twice.
    assert not pool.can_reserve(chain(1, 2), 4)
    assert pool.reserve(chain(1, 2), 4) is None
    assert (pool.num_cached, pool.num_free) == (2, 1)
    pool.check_integrity([lent])
    assert pool.reserve(chain(1, 2), 3) == Reservation([0, 1, 3], 2)


def test_released_blocks_stay_findable_until_their_room_is_needed() -> None:
    pool = BlockPool(3)
    pool.release(hold(pool, chain(1, 2), 3))
    assert (pool.num_free, pool.num_cached) == (1, 2)
    assert pool.allocate(2) == [2, 1]  # the free one, then the chain's leaf
    assert pool.match(chain(1, 2)) == [0]


def test_evicts_leaves_first_and_the_least_recently_used_of_them() -> None:
    pool = BlockPool(4)
    trunk, left, right = chain(1, 2), chain(1, 2, 3), chain(1, 2, 4)
    tables = [hold(pool, left), hold(pool, right)]
    assert tables == [[0, 1, 2], [0, 1, 3]]
    pool.release(tables[0])
    pool.release(tables[1])
    pool.release(hold(pool, left))  # used again: now `right` is the older leaf
    pool.take_events()
    assert pool.allocate(3) == [3, 2, 1]
    assert pool.take_events() == ([], [right[2], left[2], trunk[1]])
    pool.check_integrity([[3, 2, 1]])


def test_evicts_what_no_write_waits_for_first_and_what_is_being_written_never() -> None:
    pool = BlockPool(7)
    tables = [hold(pool, chain(number)) for number in range(5)]
    for table in tables:
        pool.release(table)  # so block 0 is the least recently used
    for block, has_copy in ((4, True), (2, True), (1, False)):
        pool.start_write(block)
        pool.end_write(block, has_copy=has_copy)
    pool.start_write(3)
    assert (pool.num_available, pool._cached.num(Copy.COMPLETE)) == (6, 2)
    taken: list[int] = []
    for expected, num_dropped in (
        ([5, 6], 0),  # free
        ([1], 1),  # no tier took it; it was used before those that one has
        ([2, 4], 1),  # a tier has them
        ([0], 2),  # no tier was asked yet
    ):
        taken += pool.allocate(len(expected)) or []
        assert (taken[-len(expected) :], pool.num_dropped) == (expected, num_dropped)
        pool.check_integrity([taken])
    assert pool.allocate(1) is None
    assert pool.match(chain(3)) == [3]
    pool.end_write(3, has_copy=True)
    assert (pool.allocate(1), pool.num_dropped) == ([3], 2)


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_block_that_no_tier_took_is_offered_again_at_its_next_use(is_in_use: bool) -> None:
    pool = BlockPool(4)
    first = hold(pool, chain(1, 2))
    for block_id in first:
        pool.end_write(block_id, has_copy=False)
    assert pool.next_unwritten is None
    if not is_in_use:
        pool.release(first)
    again = hold(pool, chain(1, 2))
    assert again == first
    assert list(pool._unwritten) == first  # parents come first
    pool.check_integrity([first, again] if is_in_use else [again])


def test_a_parent_that_is_offered_again_comes_before_children_that_wait() -> None:
    pool = BlockPool(6)
    first = hold(pool, chain(1, 2, 3))
    other = hold(pool, chain(9))
    for block_id in first[:2]:
        pool.end_write(block_id, has_copy=False)
    again = hold(pool, chain(1, 2, 4))
    offered = []
    while pool.has_unwritten:
        offered.append(pool.next_unwritten)
        pool.start_write(offered[-1])
        pool.end_write(offered[-1], has_copy=True)
    assert offered == [*first, *other, again[-1]]
    assert pool.next_unwritten is None
    pool.check_integrity([first, other, again])


def test_a_block_that_leaves_while_it_is_written_is_free_after_that() -> None:
    pool = BlockPool(2)
    pool.release(hold(pool, chain(1, 2)))
    pool.start_write(0)
    assert pool.drop_cached() == 2
    assert (pool.num_leaving, pool.num_free) == (1, 1)
    assert pool.allocate(2) is None
    pool.end_write(0, has_copy=True)
    assert pool.allocate(2) is not None
    pool.check_integrity([[0, 1]])


def test_a_leaf_under_a_used_parent_is_evicted_alone() -> None:
    pool = BlockPool(3)
    long, short = hold(pool, chain(1, 2, 3)), hold(pool, chain(1, 2))
    pool.release(long)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [2]
    pool.check_integrity([short, [2]])


def test_the_same_content_is_entered_once() -> None:
    pool = BlockPool(4)
    a = pool.allocate(2)
    b = pool.allocate(2)
    assert a == [0, 1]
    assert b == [2, 3]
    one, two = chain(1, 2)
    for table in (a, b):
        table[0] = pool.store(table[0], parent_id=None, parent_hash=ROOT, block_hash=one)
        table[1] = pool.store(table[1], parent_id=table[0], parent_hash=one, block_hash=two)
    assert b == [0, 1]
    assert pool.num_free == 2
    assert pool.take_events() == ([StoredBlock(ROOT, one), StoredBlock(one, two)], [])
    pool.check_integrity([a, b])


def test_events_are_net_so_that_stored_before_removed_is_true() -> None:
    pool = BlockPool(2)
    pool.release(hold(pool, chain(1, 2)))
    pool.take_events()
    table = hold(pool, chain(3))
    pool.release(table)
    assert pool.take_events() == ([StoredBlock(ROOT, chain(3)[0])], [chain(1, 2)[1]])
    other = hold(pool, chain(4, 5))  # 1 and 3 go
    pool.release(other)
    pool.release(hold(pool, chain(1)))  # 5 goes, 1 is back
    assert pool.take_events() == ([StoredBlock(ROOT, chain(4)[0])], [chain(3)[0]])
    assert not pool.has_events


def test_a_shared_or_stored_block_cannot_be_written_or_quarantined() -> None:
    pool = BlockPool(3)
    table = hold(pool, chain(1), 2)
    assert [pool.is_writable(block_id) for block_id in table] == [False, True]
    with pytest.raises(AssertionError, match="block 0 is shared"):
        pool.quarantine([0])
    with pytest.raises(AssertionError, match="block 0 is stored twice"):
        pool.store(0, parent_id=None, parent_hash=ROOT, block_hash=chain(2)[0])


def test_quarantined_blocks_are_nobodys() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    assert table == [0, 1]
    pool.quarantine([1])
    pool.release([0])
    pool.check_integrity([])
    assert (pool.num_quarantined, pool.num_used) == (1, 0)
    assert pool.allocate(3) is None
    pool.unquarantine([1, 2])  # 2 was in no quarantine: nothing happens to it
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]


def test_mistakes_are_named() -> None:
    pool = BlockPool(3)
    table = hold(pool, chain(1, 2))
    with pytest.raises(AssertionError, match="block 0 has 1 references, but 0 tables"):
        pool.check_integrity([])
    pool.release(table)
    with pytest.raises(AssertionError, match="block 1 is released once too often"):
        pool.release(table)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30), st.data())
def test_followers_of_the_events_know_what_is_here(chains: list[list[int]], data: object) -> None:
    """A tree that follows the events, at whatever step-time model, is closed and equals the
    pool.
    """
    pool = BlockPool(6)
    tree: dict[bytes, bytes] = {}
    tables: list[list[int]] = []
    for tokens in chains:
        while tables and not pool.can_reserve(chain(*tokens), len(tokens)):
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        tables.append(hold(pool, chain(*tokens)))
        pool.check_integrity(tables)
        if data.draw(st.booleans()):
            follow(pool, tree)
    follow(pool, tree)
    here = {h for tokens in chains for h in chain(*tokens) if pool.match([h])}
    assert here == set(tree)


def follow(pool: BlockPool, tree: dict[bytes, bytes]) -> None:
    stored, removed = pool.take_events()
    for event in stored:
        assert event.block_hash not in tree
        assert event.parent_hash == ROOT or event.parent_hash in tree
        tree[event.block_hash] = event.parent_hash
    for block_hash in removed:
        del tree[block_hash]
        assert block_hash not in tree.values()
