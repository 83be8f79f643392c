from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.transfer.reads.fence import Fence

BLOCKS_MAX = 6
GRACE_S = 0.5
PATIENCE_S = 10.0


def make_fence() -> Fence:
    return Fence(blocks_max=BLOCKS_MAX, grace_s=GRACE_S, patience_s=PATIENCE_S)


def test_a_late_done_frees_its_own_blocks_only() -> None:
    fence = make_fence()
    first = fence.fail([1, 2], now=0.0)
    fence.fail([3], now=0.0)
    assert fence.late_done(first) == [1, 2]
    assert fence.fenced([1, 2, 3, 4]) == {3}


def test_a_renewal_waits_for_the_grace_and_for_pulls_under_way() -> None:
    fence = make_fence()
    assert not fence.renewal_due(100.0, num_pulls_under_way=0)
    fence.fail([1], now=10.0)
    assert not fence.renewal_due(10.4, num_pulls_under_way=0)
    assert fence.renewal_due(10.5, num_pulls_under_way=0)
    assert not fence.renewal_due(99.0, num_pulls_under_way=1)


def test_a_full_fence_renews_at_once_and_never_under_a_pull() -> None:
    fence = make_fence()
    fence.fail(range(BLOCKS_MAX), now=0.0)
    assert not fence.is_full
    fence.fail([BLOCKS_MAX], now=0.0)
    assert fence.is_full
    assert fence.renewal_due(0.0, num_pulls_under_way=0)
    assert not fence.renewal_due(0.0, num_pulls_under_way=1)
    assert fence.renewed() == list(range(BLOCKS_MAX + 1))
    assert not fence.is_full


def test_a_read_that_stays_refuses_new_pulls_so_that_the_renewal_comes_under_load() -> None:
    fence = make_fence()
    stuck = fence.fail([1], now=5.0)
    fence.fail([2], now=14.9)
    assert not fence.refuses(15.0)
    assert fence.refuses(15.1)
    fence.late_done(stuck)
    assert not fence.refuses(15.1), "the younger one has time yet"
    assert fence.refuses(25.0)
    fence.renewed()
    assert not fence.refuses(100.0)


def test_a_read_into_scratch_memory_asks_for_a_renewal_too() -> None:
    fence = make_fence()
    fence.fail([], now=0.0)
    assert fence.num_blocks == 0
    assert fence.renewal_due(GRACE_S, num_pulls_under_way=0)
    fence.renewed()
    assert not fence.holds_reads


def test_a_block_is_fenced_until_the_last_read_of_its_parts_has_ended() -> None:
    fence = make_fence()
    first, second = (fence.fail(blocks, now=0.0) for blocks in ([1, 2], [1]))
    assert fence.late_done(first) == [2]
    assert fence.fenced([1, 2]) == {1}
    assert fence.late_done(second) == [1]
    assert fence.num_blocks == 0


class FenceMachine(RuleBasedStateMachine):
    """Against a plain model: a block is fenced while a given-up read of it is unfinished."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = make_fence()
        self.reads: dict[int, set[int]] = {}
        self.now = 0.0
        self.failed_at: dict[int, float] = {}
        self.instance = 0

    @property
    def blocks(self) -> set[int]:
        return set().union(*self.reads.values())

    @rule(
        blocks=st.sets(st.integers(0, 15), max_size=5),
        passed_s=st.integers(0, 8).map(lambda n: n / 8),
    )
    def fail(self, blocks: set[int], passed_s: float) -> None:
        self.now += passed_s
        read = self.fence.fail(blocks, self.now)
        assert read not in self.reads
        self.reads[read], self.failed_at[read] = blocks, self.now

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def late_done(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.reads)))
        blocks = self.reads.pop(read)
        assert set(self.fence.late_done(read)) == blocks - self.blocks

    @rule()
    def renew(self) -> None:
        assert set(self.fence.renewed()) == self.blocks
        self.reads.clear()
        self.instance += 1

    @rule(under_way=st.integers(0, 2), passed_s=st.integers(0, 48).map(lambda n: n / 8))
    def ask(self, under_way: int, passed_s: float) -> None:
        self.now += passed_s
        # Of the reads that are left: one that ended by itself needs no more time.
        ages = [self.now - self.failed_at[read] for read in self.reads]
        assert self.fence.refuses(self.now) == (
            self.fence.is_full or max(ages, default=0.0) > PATIENCE_S
        )
        waited = all(self.now >= self.failed_at[read] + GRACE_S for read in self.reads)
        expected = bool(self.reads) and not under_way and (waited or self.fence.is_full)
        assert self.fence.renewal_due(self.now, under_way) == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.fence.fenced(range(16)) == self.blocks
        assert self.fence.num_blocks == len(self.blocks)
        assert self.fence.is_full == (len(self.blocks) > BLOCKS_MAX)
        assert self.fence.instance == self.instance
        assert self.fence.holds_reads == bool(self.reads)


TestFenceMachine = FenceMachine.TestCase
