from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.ops.simulator.workers.kv_cache import SimulatedKvCache


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(length)]


def run_through(
    cache: SimulatedKvCache, hashes: list[bytes], num_more: int = 0
) -> list[bytes] | None:
    """A sequence of the chain that ends at once; who was evicted for it."""
    cached = cache.num_cached(hashes)
    evicted = cache.reserve(hashes[:cached], len(hashes) - cached + num_more)
    if evicted is not None:
        cache.store(hashes[cached:])
        cache.release(hashes, num_more)
    return evicted


def test_the_leaf_goes_before_its_parents_and_old_chains_before_new_ones() -> None:
    cache = SimulatedKvCache(6)
    old = chain("old", 3)
    new = chain("new", 3)
    assert run_through(cache, old) == []
    assert run_through(cache, new) == []
    assert run_through(cache, chain("x", 2)) == [old[2], old[1]]
    assert cache.num_cached(old) == 1
    assert cache.num_cached(new) == 3


def test_what_is_used_again_stays() -> None:
    cache = SimulatedKvCache(6)
    one = chain("one", 3)
    two = chain("two", 3)
    run_through(cache, one)
    run_through(cache, two)
    run_through(cache, one)
    assert run_through(cache, chain("x", 3)) == two[::-1]
    assert cache.num_cached(one) == 3


def test_held_blocks_are_not_evicted_and_too_much_is_refused_whole() -> None:
    cache = SimulatedKvCache(5)
    held = chain("held", 3)
    assert cache.reserve([], 3) == []
    assert cache.store(held) == held
    assert cache.num_used == 3
    assert cache.reserve([], 3) is None
    assert cache.reserve(held[:2], 2) == []
    assert cache.reserve(held, 1) is None
    cache.release(held, 0)
    assert cache.num_used == 4
    assert cache.reserve([], 1) == [held[2]]


def test_a_twin_is_stored_once() -> None:
    cache = SimulatedKvCache(8)
    hashes = chain("a", 3)
    assert cache.reserve([], 3) == []
    assert cache.reserve([], 3) == []
    assert cache.store(hashes) == hashes
    assert cache.store(hashes) == []
    assert cache.num_used == 3
    cache.release(hashes, 0)
    cache.check_integrity()
    cache.release(hashes, 0)
    assert cache.num_used == 0
    assert cache.num_cached(hashes) == 3


steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 3), st.booleans()),
    max_size=40,
)


@given(steps, st.integers(1, 12))
def test_counts_add_up_and_parents_outlive_children(
    moves: list[tuple[str, int, int, bool]], num_blocks: int
) -> None:
    cache = SimulatedKvCache(num_blocks)
    there: set[bytes] = set()
    live: list[tuple[list[bytes], int]] = []
    for name, length, more, ends in moves:
        hashes = chain("root", min(1, length)) + chain(name, max(0, length - 1))
        cached = cache.num_cached(hashes)
        evicted = cache.reserve(hashes[:cached], len(hashes) - cached + more)
        if evicted is not None:
            there.difference_update(evicted)
            there.update(cache.store(hashes[cached:]))
            live.append((hashes, more))
        if ends and live:
            cache.release(*live.pop(0))
        cache.check_integrity()
        for name_ in "abc":
            whole = chain("root", 1) + chain(name_, 3)
            assert cache.num_cached(whole) == sum(h in there for h in whole)
