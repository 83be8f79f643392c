"""Which frozen state is evicted when the pool of a state group is full."""

from __future__ import annotations

from tandem.engine.cache.pool.window_pool import FrozenStatePool


def freeze(pool: FrozenStatePool, name: bytes) -> None:
    """Caches a state under a hash, as the end of a chunk does."""
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.store(blocks[0], parent_id=None, parent_hash=b"", block_hash=name)
    pool.release(blocks)


def resume(pool: FrozenStatePool, name: bytes) -> None:
    """References a cached state while it is copied."""
    found = pool.reserve([name], 1)
    assert found is not None
    assert found.num_cached_blocks == 1
    pool.release(found.block_table)


def cached(pool: FrozenStatePool) -> set[bytes]:
    return {name for name in (b"a", b"b", b"c", b"d", b"e") if pool.find(name) is not None}


def test_the_states_that_were_used_least_recently_are_evicted() -> None:
    """Also if all states were reused: a new one does not push out the one before it."""
    pool = FrozenStatePool(3)
    for name in (b"a", b"b", b"c"):
        freeze(pool, name)
    for name in (b"a", b"c", b"b"):
        resume(pool, name)
    freeze(pool, b"d")
    assert cached(pool) == {b"b", b"c", b"d"}
    freeze(pool, b"e")
    assert cached(pool) == {b"b", b"d", b"e"}
    resume(pool, b"d")
    pool.want_copies([b"b"])
    resume(pool, b"e")
    freeze(pool, b"a")
    assert cached(pool) == {b"a", b"d", b"e"}
    pool.check_integrity([])


def test_a_state_that_a_tier_copies_is_not_taken() -> None:
    """The sequence that takes it would change it while it is copied."""
    pool = FrozenStatePool(2)
    freeze(pool, b"a")
    pool.want_copies([b"a"])
    slot = pool.next_unwritten
    assert slot is not None
    assert pool.may_take(slot)
    pool.start_write(slot)
    assert not pool.may_take(slot)
    pool.end_write(slot, has_copy=True)
    assert pool.may_take(slot)
    assert pool.take(slot) == [slot]
    assert cached(pool) == set()


def test_a_state_that_is_marked_goes_first() -> None:
    pool = FrozenStatePool(3)
    for name in (b"a", b"b", b"c"):
        freeze(pool, name)
    resume(pool, b"c")
    pool.evict_first(b"c")
    freeze(pool, b"d")
    assert cached(pool) == {b"a", b"b", b"d"}
