"""Pins of blocks: within each tenant's share, until their time, and in nobody's way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.common.block_hash import hash_blocks
from tandem.common.retention import Kept, Retention
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.pins import Fate, Pins
from tandem.engine.engine import Engine
from tandem.engine.types import PinStats
from tests.engine_driver import make_engine, make_spec

A, B, C = b"tenant a", b"tenant b", b"tenant c"


def chain(tenant: bytes, *tokens: int) -> list[bytes]:
    """Hashes of a tenant's chain of blocks of one token."""
    return hash_blocks(tenant.ljust(16), tokens, 1)


def settle(engine: Engine) -> None:
    """Steps until nothing is left to do, for the tiers' threads neither."""
    while engine.has_work() or engine.awaits_threads():
        engine.step()


def store(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    found = pool.reserve(hashes, len(hashes))
    assert found is not None
    table = found.block_table
    for i in range(found.num_cached_blocks, len(hashes)):
        table[i] = pool.store(
            table[i],
            parent_id=table[i - 1] if i else None,
            parent_hash=hashes[i - 1] if i else b"",
            block_hash=hashes[i],
        )
    return table


def test_a_tenant_pins_the_first_blocks_that_fit_its_share() -> None:
    pins = Pins(4)
    assert pins.pin(A, 1, chain(A, 1, 2, 3, 4, 5, 6), until=9.0) == 4
    assert pins.pin(A, 1, chain(A, 7), until=9.0) == 0
    assert pins.fates == {Fate.PINNED: 4, Fate.REFUSED: 3}


def test_shares_are_by_weight_and_the_ends_that_end_first_are_trimmed() -> None:
    pins = Pins(9)
    assert pins.pin(A, 2, chain(A, 1, 2, 3, 4, 5), until=9.0) == 5
    assert pins.pin(A, 2, chain(A, 1, 8, 9), until=5.0) == 3
    assert pins.pin(B, 1, chain(B, 1), until=9.0) == 1
    assert pins.share(A, 2) == 6
    assert chain(A, 1, 8, 9)[2] not in pins
    assert all(h in pins for h in (*chain(A, 1, 2, 3, 4, 5), *chain(A, 1, 8)))
    assert pins.fates[Fate.TRIMMED] == 1


def test_who_may_pin_nothing_takes_nothing_from_others() -> None:
    pins = Pins(4)
    assert pins.pin(A, 1000, chain(A, 1, 2, 3, 4), until=9.0) == 4
    assert pins.pin(B, 1, chain(B, 1), until=9.0) == 0
    assert pins.count(A) == 4


def test_a_longer_wish_for_the_same_blocks_holds() -> None:
    pins = Pins(4)
    pins.pin(A, 1, chain(A, 1, 2), until=5.0)
    pins.pin(A, 1, chain(A, 1), until=9.0)
    pins.pin(A, 1, chain(A, 1), until=2.0)
    pins.expire(5.0)
    assert [h in pins for h in chain(A, 1, 2)] == [True, False]
    pins.expire(9.0)
    assert len(pins) == 0
    assert pins.fates[Fate.EXPIRED] == 2


def test_a_pinned_chain_is_evicted_last_and_its_end_first() -> None:
    pool = BlockPool(6)
    pool.pins.capacity = 6
    pool.release(store(pool, chain(A, 1, 2)))
    pool.release(store(pool, chain(B, 1, 2)))
    pool.pin(A, 1, chain(A, 1, 2), until=9.0)
    taken = pool.allocate(4)
    assert taken is not None
    assert len(pool.match(chain(A, 1, 2))) == 2
    assert pool.match(chain(B, 1, 2)) == []
    more = pool.allocate(1)
    assert more is not None
    assert len(pool.match(chain(A, 1, 2))) == 1
    assert pool.pins.fates[Fate.EVICTED] == 1
    pool.check_integrity([[*taken, *more]])


def test_an_expired_pin_protects_nothing() -> None:
    pool = BlockPool(2)
    pool.pins.capacity = 2
    pool.release(store(pool, chain(A, 1)))
    pool.pin(A, 1, chain(A, 1), until=9.0)
    pool.release(store(pool, chain(B, 1)))
    pool.expire_pins(9.0)
    pool.release(store(pool, chain(C, 1)))
    assert pool.match(chain(A, 1)) == []
    assert len(pool.match(chain(B, 1))) == 1


def test_a_block_that_comes_to_a_tier_after_its_pin_is_pinned() -> None:
    engine, _ = make_engine(num_blocks=8, kv_host_bytes=6 * 32, kv_pin_share=1.0)
    kept = engine.kept
    for number in range(6):
        retention = Retention(pin_s=60.0) if not number else Retention()
        prompt = [number * 10 + i for i in range(8)]
        engine.add(make_spec(str(number), prompt, max_tokens=1, retention=retention))
        settle(engine)
    (first,) = [tier.pool for tier in kept._tiers.tiers]
    assert [(pins.place, pins.blocks) for pins in kept.stats()] == [("device", 2), ("host", 2)]
    assert len(first.pins) == 2
    engine.check_integrity()
    engine.close()


def test_the_engine_keeps_what_a_sequence_asked_for_until_its_time() -> None:
    engine, _ = make_engine(num_blocks=16, kv_pin_share=0.25)
    now = [0.0]
    engine.kept.clock = lambda: now[0]
    prompt = list(range(24))
    retention = Retention(pin_s=10.0)
    engine.add(make_spec("a", prompt, max_tokens=1, retention=retention, cache_salt=A))
    settle(engine)
    assert engine.stats().pins == [PinStats("device", 4, fates(pinned=4, refused=2))]
    now[0] = 10.0
    engine.add(make_spec("b", [7], max_tokens=1))
    settle(engine)
    assert engine.stats().pins == [PinStats("device", 0, fates(pinned=4, refused=2, expired=4))]
    engine.check_integrity()


def fates(**known: int) -> dict[str, int]:
    return {fate.value: known.get(fate.value, 0) for fate in Fate}


def test_the_engine_says_what_it_keeps_and_why_not() -> None:
    engine, _ = make_engine(num_blocks=16, kv_pin_share=0.25)
    engine.add(make_spec("a", list(range(24)), max_tokens=1, cache_salt=A))
    hashes = engine._sequences.find("a").block_hashes
    settle(engine)
    keep = engine.kept.keep
    assert keep(A, Retention(pin_s=9.0), hashes[:4]) == Kept(4)
    assert keep(A, Retention(pin_s=9.0), hashes) == Kept(
        4, "the tenant may protect at most 4 blocks from eviction"
    )
    assert keep(A, Retention(), hashes) == Kept(0)
    assert keep(A, Retention(pin_s=9.0, num_tokens=11), hashes) == Kept(2)  # in full blocks of 4
    assert keep(A, Retention(pin_s=9.0, num_tokens=3), hashes) == Kept(0)
    assert keep(A, Retention(pin_s=9.0), [*hashes[:2], b"x" * 16]) == Kept(
        2, "the other blocks are no longer cached"
    )


def test_nothing_is_pinned_without_a_share() -> None:
    engine, _ = make_engine(num_blocks=16, kv_pin_share=0.0)
    engine.add(make_spec("a", list(range(9)), max_tokens=1, retention=Retention(pin_s=9.0)))
    settle(engine)
    assert engine.stats().pins == [PinStats("device", 0, fates(refused=2))]


class Machine(RuleBasedStateMachine):
    """Tenants that run, pin and wait in any order on one pool."""

    tenants = st.sampled_from([A, B, C])
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)

    @initialize(
        num_blocks=st.integers(2, 16),
        capacity=st.integers(0, 16),
        weights=st.lists(st.sampled_from([1, 2, 50]), min_size=3, max_size=3),
    )
    def start(self, num_blocks: int, capacity: int, weights: list[int]) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.pins.capacity = min(capacity, num_blocks)
        self.weights = dict(zip((A, B, C), weights, strict=True))
        self.now = 0.0
        self.until: dict[bytes, float] = {}
        self.tables: list[list[int]] = []

    @rule(tenant=tenants, tokens=tokens)
    def run(self, tenant: bytes, tokens: list[int]) -> None:
        """Whoever fits beside what runs is admitted, whatever is pinned."""
        pool, hashes = self.pool, chain(tenant, *tokens)
        used = {block for table in self.tables for block in table}
        matched = pool.match(hashes)
        fits = len(used | set(matched)) + len(hashes) - len(matched) <= pool.num_blocks
        assert pool.can_reserve(hashes, len(hashes)) is fits
        if not fits:
            return
        pinned = {h for h in self.until if h in pool.pins}
        self.tables.append(store(pool, hashes))
        if any(h not in pool.pins for h in pinned):
            cached = [b for b in pool._blocks if b.block_hash and not b.num_references]
            assert all(b.is_pinned for b in cached), "a pinned block went before another"

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(index % len(self.tables)))

    @rule(tenant=tenants, tokens=tokens, seconds=st.sampled_from([1.0, 2.0, 5.0]))
    def pin(self, tenant: bytes, tokens: list[int], seconds: float) -> None:
        hashes = chain(tenant, *tokens)
        here = hashes[: len(self.pool.match(hashes))]
        new = {h for h in here if h not in self.pool.pins}
        share = self.pool.pins.share(tenant, self.weights[tenant])
        room = share - self.pool.pins.count(tenant)
        num_pinned = self.pool.pin(tenant, self.weights[tenant], here, self.now + seconds)
        assert (num_pinned == len(here)) is (len(new) <= room or not here)
        for h in here[:num_pinned]:
            self.until[h] = max(0.0 if h in new else self.until[h], self.now + seconds)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire_pins(self.now)
        assert all(self.until[h] > self.now for h in self.until if h in self.pool.pins)

    @invariant()
    def nobody_has_more_than_its_share(self) -> None:
        if not hasattr(self, "pool"):
            return
        pins = self.pool.pins
        self.pool.check_integrity(self.tables)
        pinned = {t: w for t, w in self.weights.items() if pins.count(t)}
        for tenant, weight in pinned.items():
            assert pins.count(tenant) <= pins.capacity * weight // sum(pinned.values())
        for block in self.pool._blocks:
            if block.is_pinned and block.parent_id is not None:
                assert self.pool._blocks[block.parent_id].is_pinned


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
