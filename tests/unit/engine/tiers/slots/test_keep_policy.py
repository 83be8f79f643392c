"""Each policy decides which blocks a tier takes and evicts."""

from __future__ import annotations

import math
from hashlib import blake2b
from random import Random

import numpy as np
import pytest

from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.common.retention import PRIORITY_DEFAULT, Retention
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.tiers.device.blocks import HostPages
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.slots import frequency_sketch
from tandem.engine.tiers.slots.frequency_sketch import FrequencySketch
from tandem.engine.tiers.slots.keep_policy import HighestPriorities, keep_policy
from tandem.engine.tiers.slots.slot_pool import SlotPool
from tandem.engine.tiers.storage import Entry
from tandem.engine.tiers.tier import Tier, TierGroup
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.unit.engine.tiers.test_tiers import BLOCK_BYTES, prompt, settle

BLOCK_SIZE = 16


def name(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


class TestFrequencySketch:
    def test_it_is_compiled_here(self) -> None:
        assert frequency_sketch._sketch_cells is not None

    def test_compiled_and_plain_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = Random(5)
        added = [[rng.randbytes(16) for _ in range(9)] for _ in range(60)]  # cells are shared
        compiled, plain = FrequencySketch(16), FrequencySketch(16)
        for number, blocks in enumerate(added):
            compiled.add(blocks, 1 + number % 2)
        monkeypatch.setattr(frequency_sketch, "_sketch_cells", None)
        for number, blocks in enumerate(added):
            plain.add(blocks, 1 + number % 2)
        found = [plain.log2(block) for blocks in added for block in blocks]
        monkeypatch.undo()
        assert found == [compiled.log2(block) for blocks in added for block in blocks]

    @pytest.mark.parametrize("block_hash", [b"short", b"x" * 17])
    def test_what_is_no_block_hash_is_refused(self, block_hash: bytes) -> None:
        sketch = FrequencySketch(16)
        with pytest.raises(ValueError, match="16 bytes"):
            sketch.add([block_hash])
        with pytest.raises(ValueError, match="16 bytes"):
            sketch.estimate(block_hash)

    def test_counts_uses(self) -> None:
        sketch = FrequencySketch(1000)
        for number in range(8):
            for _ in range(number):
                sketch.add([name(number)])
        assert [round(sketch.estimate(name(number))) for number in range(8)] == list(range(8))

    def test_is_seldom_too_high_and_never_too_low(self) -> None:
        sketch = FrequencySketch(1000)
        sketch.add([name(number) for number in range(1000)])
        found = [sketch.estimate(name(number)) for number in range(1000)]
        unused = [sketch.estimate(name(number)) for number in range(1000, 2000)]
        assert min(found) > 0.8  # a quarter of a half-life ago
        assert sum(estimate > 1.5 for estimate in found) < 20
        assert sum(estimate > 0 for estimate in unused) < 20

    def test_what_was_used_long_ago_fades(self) -> None:
        sketch = FrequencySketch(64)
        sketch.add([name(0)], 8)
        old = sketch.log2(name(0))
        rng = Random(0)
        for _ in range(200):  # many rescalings
            sketch.add([name(rng.randrange(1, 1 << 30)) for _ in range(512)])
        sketch.add([name(1)], 2)
        assert sketch.estimate(name(1)) > 1.9
        assert sketch.log2(name(1)) > old
        assert sketch.log2(name(0)) >= old


def fill(policy: str, uses: dict[int, int], num_slots: int) -> SlotPool:
    """A pool into which chains of one block were written in this order."""
    keep = keep_policy(policy, num_slots, BLOCK_SIZE)
    pool = SlotPool(num_slots, keep)
    for number, count in uses.items():
        for _ in range(count):
            keep.use([name(number)], keep=False)
        table = pool.allocate(1)
        assert table is not None
        pool.adopt(table[0], Entry(name(number), b""))
    return pool


def evict(pool: SlotPool, num_slots: int) -> list[bytes]:
    table = pool.allocate(num_slots)
    assert table is not None
    return pool.take_removed()


@pytest.mark.parametrize(("policy", "evicted"), [("lru", [0, 1]), ("value", [1, 3])])
def test_what_goes_first(policy: str, evicted: list[int]) -> None:
    pool = fill(policy, {0: 4, 1: 1, 2: 3, 3: 2}, 4)
    assert evict(pool, 2) == [name(number) for number in evicted]


def test_a_use_after_the_write_counts() -> None:
    pool = fill("value", {0: 1, 1: 2, 2: 3}, 3)
    pool.policy.use([name(0)], keep=True)
    assert evict(pool, 1) == [name(1)]


def test_blocks_found_at_the_start_are_worth_two_uses() -> None:
    pool = SlotPool(3, keep_policy("value", 3, BLOCK_SIZE))
    entries = [(slot, Entry(name(slot), b"")) for slot in range(2)]
    assert pool.restore(entries) == 0
    pool.policy.restore([entry.block_hash for _, entry in entries])  # of another KV group
    pool.policy.use([name(0)], keep=False)
    pool.policy.use([name(2)], keep=True)
    table = pool.allocate(1)
    assert table is not None
    pool.adopt(table[0], Entry(name(2), b""))
    assert [evict(pool, 1) for _ in range(3)] == [[name(number)] for number in (1, 2, 0)]


def prioritized(priorities: list[int | None]) -> SlotPool:
    """A pool into which chains of one block were written, after a use of this priority if one."""
    pool = SlotPool(len(priorities), keep_policy("priority", len(priorities), BLOCK_SIZE))
    for number, priority in enumerate(priorities):
        if priority is not None:
            pool.policy.use([name(number)], keep=False, priority=priority)
        table = pool.allocate(1)
        assert table is not None
        pool.adopt(table[0], Entry(name(number), b""))
    return pool


@pytest.mark.parametrize(
    ("priorities", "evicted"),
    [
        ([100, 0, 50, 35], [1, 3, 2, 0]),
        ([50, 0, 50, 0], [1, 3, 0, 2]),  # of the same the least recently used
        ([36, None, 34, 35], [2, 1, 3, 0]),  # one that a tier found when it started
    ],
)
def test_the_lowest_priority_goes_first(priorities: list[int | None], evicted: list[int]) -> None:
    pool = prioritized(priorities)
    gone = [evict(pool, 1) for _ in priorities]
    assert gone == [[name(number)] for number in evicted]


def test_the_highest_priority_of_a_blocks_requests_counts() -> None:
    pool = prioritized([0, 10, 20])
    pool.policy.use([name(0)], keep=False, priority=100)  # after the write
    pool.policy.use([name(0), name(2)], keep=True, priority=5)
    assert [pool.policy.worth(name(number), number) for number in range(3)] == [100, 10, 20]
    assert [evict(pool, 1) for _ in range(3)] == [[name(number)] for number in (1, 2, 0)]


def test_priorities_of_the_blocks_used_last_are_remembered() -> None:
    policy = HighestPriorities(num_remembered=3)
    policy.use([name(number) for number in range(3)], keep=False, priority=90)
    policy.use([name(0)], keep=False, priority=10)
    policy.use([name(3), name(4)], keep=False, priority=80)
    found = [policy.worth(name(number), 0) for number in range(5)]
    assert found == [90, PRIORITY_DEFAULT, PRIORITY_DEFAULT, 80, 80]
    assert len(policy._priorities) == 3


@pytest.mark.parametrize(("policy", "depth"), [("priority", 7), ("lru", 0)])
def test_an_engine_keeps_the_prompt_of_the_highest_priority(policy: str, depth: int) -> None:
    """The tier has room for two of four prompts, and the first one is the oldest."""
    host_bytes = 14 * BLOCK_BYTES
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=host_bytes, kv_tier_policy=policy)
    chains = []
    for number, priority in enumerate((100, 0, PRIORITY_DEFAULT, 0)):
        asked = Retention(priority=priority)
        engine.add(make_spec(str(number), prompt(number), retention=asked))
        chains.append(engine._sequences.find(str(number)).block_hashes)
        settle(engine, Outcome())
    (tier,) = engine._tiers.tiers
    assert tier.depth(chains[0][:7]) == depth
    engine.close()


def test_a_prompt_that_is_always_in_use_gets_its_copy_at_the_second_use() -> None:
    """A system prompt is such a prompt. The tier did not take it at its first use."""
    engine, _ = make_engine(num_blocks=32, kv_host_bytes=1 << 15, kv_tier_policy="value")
    (tier,), outcome = engine._tiers.tiers, Outcome()
    for name in ("first", "second"):
        engine.add(make_spec(name, prompt(0)))
        hashes = engine._sequences.find(name).block_hashes
        while not outcome.token_ids.get(name):
            outcome.take(engine.step())
        assert tier.depth(hashes[:6]) == 0
        assert engine.load().num_running == (1 if name == "first" else 2)
    settle(engine, outcome)
    assert tier.depth(hashes[:6]) == 6
    engine.close()


@pytest.mark.parametrize("policy", ["prefix", "lru"])
def test_the_longest_prefix_is_cut_first(policy: str) -> None:
    """There are two chains of 8 and 2 blocks, and the longer one is older."""
    pool = SlotPool(10, keep_policy(policy, 10, BLOCK_SIZE))
    for first, size in ((0, 8), (8, 2)):
        for number in range(first, first + size):
            table = pool.allocate(1)
            assert table is not None
            parent = b"" if number == first else name(number - 1)
            pool.adopt(table[0], Entry(name(number), parent))
    gone = evict(pool, 8)
    assert gone[:6] == [name(number) for number in range(7, 1, -1)]
    assert gone[6:] == ([name(1), name(9)] if policy == "prefix" else [name(1), name(0)])


def value_tier(num_slots: int, *chains: tuple[int, int]) -> tuple[Tier, SlotPool]:
    """A tier with chains of so many blocks that were used so many times. Blocks are numbered from 0
    on, chain after chain."""
    storage = host_storage(num_slots)
    layout = KvLayout.of_one(BlockLayout(num_slots, 1, 1, BLOCK_SIZE, 1, "int8"))
    tier = Tier(0, [storage], keep_policy("value", num_slots, BLOCK_SIZE), layout)
    first = 0
    for size, uses in chains:
        write(tier.groups[0], entries(first, size), uses=uses, at_once=size)
        first += size
    return tier, tier.pool


FLAT = PrefillRate(token_s=1e-3, token_context_s=0.0)
STEEP = PrefillRate(token_s=0.0, token_context_s=1e-3)


@pytest.mark.parametrize(
    ("rates", "gone"),
    [
        ((FLAT,), [3, 2, 1, 0, 4]),  # of blocks that cost the same the least used goes
        ((STEEP,), [4, 3, 2, 1, 0]),  # the end of the longer chain costs most
        ((FLAT, STEEP), [4, 3, 2, 1, 0]),
        ((STEEP, FLAT), [3, 2, 1, 0, 4]),
    ],
)
def test_the_measured_rate_says_what_a_block_costs(
    rates: tuple[PrefillRate, ...], gone: list[int]
) -> None:
    tier, pool = value_tier(5, (4, 3), (1, 4))
    for rate in rates:
        tier.take_rate(rate)
    assert [evict(pool, 1) for _ in gone] == [[name(number)] for number in gone]


def test_all_leaves_get_their_new_ranks_after_some_evictions() -> None:
    """No eviction looks at more than a few of them."""
    tier, pool = value_tier(120, *((4, 2 + number % 5) for number in range(30)))
    tier.take_rate(STEEP)
    evict(pool, 1)
    tier.take_rate(FLAT)
    evict(pool, 120 // 8)
    leaves = [pool._blocks[slot] for slot in pool.leaves()]
    assert len(leaves) >= 20
    for leaf in leaves:
        assert leaf.block_hash is not None
        assert leaf.worth == pool.policy.worth(leaf.block_hash, 0)


def test_a_rate_that_changes_little_changes_no_rank() -> None:
    policy = keep_policy("value", 100, BLOCK_SIZE)
    policy.use([name(0)], keep=True)
    rate = PrefillRate(token_s=1e-3, token_context_s=1e-6)
    assert not policy.take_rate(rate)  # deep blocks are worth more than by the guess
    worth = policy.worth(name(0), 300)
    assert not policy.take_rate(PrefillRate(token_s=1e-3, token_context_s=0.95e-6))
    assert policy.worth(name(0), 300) == worth
    assert policy.take_rate(PrefillRate(token_s=1e-3, token_context_s=0.8e-6))
    assert policy.worth(name(0), 300) < worth
    assert policy.take_rate(PrefillRate(0.0, 0.0, 0.0))
    assert policy.worth(name(0), 300) == policy.worth(name(0), 0)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("rate", [FLAT, PrefillRate(), PrefillRate(token_context_s=1e-6)])
def test_what_a_block_costs_is_what_its_tokens_take(rate: PrefillRate, block_size: int) -> None:
    policy = keep_policy("value", 100, block_size)
    policy.use([name(0)], keep=True)
    policy.take_rate(rate)
    costs = [rate.seconds(block_size, index * block_size) - rate.step_s for index in range(1, 1000)]
    worths = [policy.worth(name(0), index) for index in range(1, 1000)]
    first, last = costs[0], costs[-1]
    assert math.isclose(2 ** (worths[-1] - worths[0]), last / first, rel_tol=0.05)


def test_the_policy_gets_the_rate_that_the_engine_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepTimeModel, "prefill_rate", STEEP)
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15, kv_tier_policy="value")
    (tier,) = engine._tiers.tiers
    tier.policy.use([name(0)], keep=True)
    guessed = tier.policy.worth(name(0), 99) - tier.policy.worth(name(0), 0)
    engine.add(make_spec("one", prompt(0)))
    settle(engine, Outcome())
    measured = tier.policy.worth(name(0), 99) - tier.policy.worth(name(0), 0)
    assert measured > guessed + 1.0
    engine.close()


def tier_group(policy: str, num_slots: int) -> TierGroup:
    """A tier full of a chain of blocks that were used five times."""
    storage = host_storage(num_slots)
    group = TierGroup(0, storage, SlotPool(num_slots, keep_policy(policy, num_slots, BLOCK_SIZE)))
    write(group, entries(0, num_slots), uses=5, at_once=num_slots)
    assert group.pool.num_free == 0
    return group


def host_storage(num_slots: int) -> HostStorage:
    pages = HostPages(np.zeros(num_slots, np.uint8), is_device_accessible=True)
    return HostStorage(pages, block_bytes=1)


def entries(first: int, size: int) -> list[Entry]:
    hashes = [name(number) for number in range(first, first + size)]
    return [Entry(*each) for each in zip(hashes, [b"", *hashes], strict=False)]


def write(group: TierGroup, chain: list[Entry], *, uses: int, at_once: int) -> None:
    for _ in range(uses):
        group.pool.policy.use([entry.block_hash for entry in chain], keep=False)
    for first in range(0, len(chain), at_once):
        some = [(entry, group.target(entry)) for entry in chain[first : first + at_once]]
        for entry, target in some:
            assert target is not None
            target.is_written = True
            group.settle(entry, target, is_current=True)
    group.pool.check_integrity([])


@pytest.mark.parametrize("policy", ["lru", "prefix", "priority", "value"])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_full_tier_takes_a_chain_in_parts(policy: str, at_once: int) -> None:
    """The part that was written is worth less than the other chain, and stays for the rest."""
    group, chain = tier_group(policy, 10), entries(10, 5)
    write(group, chain, uses=2, at_once=at_once)
    assert group.pool.depth([entry.block_hash for entry in chain]) == 5
    assert group.pool.num_free == 0


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_a_chain_that_is_longer_than_the_tier_fills_it(at_once: int) -> None:
    """Its next block takes no slot of the blocks before it."""
    pages = HostPages(np.zeros(10, np.uint8), is_device_accessible=True)
    group = TierGroup(
        0, HostStorage(pages, block_bytes=1), SlotPool(10, keep_policy("lru", 10, BLOCK_SIZE))
    )
    chain = entries(0, 18)
    for first in range(0, len(chain), at_once):
        some = [(entry, group.target(entry)) for entry in chain[first : first + at_once]]
        for entry, target in some:
            if target is not None:
                target.is_written = True
                group.settle(entry, target, is_current=True)
    assert group.pool.depth([entry.block_hash for entry in chain]) == 10


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_a_full_tier_learns_a_chain(policy: str) -> None:
    group, chain = tier_group(policy, 10), entries(10, 5)
    group.learn(chain)
    assert group.pool.depth([entry.block_hash for entry in chain]) == 5
    assert group.pool.num_free == 0


@pytest.mark.parametrize(("uses", "is_taken"), [(0, False), (1, False), (2, True)])
def test_a_block_is_taken_at_its_second_use(uses: int, is_taken: bool) -> None:
    policy = keep_policy("value", 100, BLOCK_SIZE)
    for _ in range(uses):
        policy.use([name(number) for number in range(10)], keep=False)
    assert policy.takes(name(3)) is is_taken
    for other in ("lru", "prefix", "priority"):
        assert keep_policy(other, 100, BLOCK_SIZE).takes(name(3))
