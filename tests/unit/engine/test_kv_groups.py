"""Two engines with KV groups, one of which computes or holds KV for the other, in any order.

Tokens are the oracle's, no table holds more of a window than its bound, and nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.common.block_hash import chain_root, hash_blocks
from tandem.common.kv_budget import KvBudget
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvGroup, KvLayout
from tandem.engine.engine import Engine
from tandem.engine.types import FinalBlocks, Mode, Reserved, SequenceSpec, StepReport
from tandem.errors import NeverFits
from tests.engine_driver import drive_all, make_spec
from tests.grouped_toy import STATE, GroupedToyRunner, Windows, continuation, make_grouped_engine
from tests.kv_indexer import KvIndexer

MAX_MODEL_LEN = 30
BLOCK_SIZES = (1, 2, 4)
ALL_WINDOWS: list[Windows] = [(None, 3), (5,), (None, 7), (None, 4, 9), (1,), (None, 1)]
ALL_WINDOWS += [(None, STATE), (None, 5, STATE), (None, STATE)]


def check_bounds(engine: Engine, tokens_per_step: int) -> None:
    """No table holds more of a window than its bound, in tokens a block more at each end."""
    for sequence in engine._sequences.values():
        layout = sequence.tables.budget or engine.layout
        for number, group in enumerate(layout.groups):
            if group.window is None or not sequence.tables:
                continue
            held = len(sequence.tables.held(number)) - group.kept_blocks
            chunk = 1 if sequence.in_decode else tokens_per_step
            assert held <= layout.blocks_of(group.window) + 1 + layout.blocks_of(chunk)
            assert held <= layout.blocks_of(group.window) + 2 or not sequence.in_decode


@dataclass
class Request:
    spec: SequenceSpec
    expected: list[int]
    made: list[int] = field(default_factory=list)
    targets: list[int] | None = None  # blocks that are to be filled
    num_cached: int = 0
    num_came: int = 0
    lent_at: str = ""  # the id of the lease at the other engine

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id


@dataclass
class Prefix:
    """The prefix of a lease's sequence, which the peer gets from here."""

    lease_id: str
    targets: list[int]
    num_cached: int
    num_came: int = 0


class Pair(RuleBasedStateMachine):
    load_s_max = 0.0  # for which a consumer lets an engine load blocks from tiers

    @initialize(
        windows=st.sampled_from(ALL_WINDOWS),
        block_size=st.sampled_from(BLOCK_SIZES),
        num_blocks=st.integers(8, 40),
        max_num_seqs=st.integers(1, 4),
        tokens=st.integers(1, 9),
        launches_ahead=st.booleans(),
    )
    def start(
        self,
        windows: Windows,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        tokens: int,
        launches_ahead: bool,
    ) -> None:
        self.windows, self.tokens = windows, tokens
        self.here, self.runner = self._engine(block_size, num_blocks, max_num_seqs)
        self.there, self.far_runner = self._engine(block_size, num_blocks, max_num_seqs)
        self.runner.launches_ahead = self.far_runner.launches_ahead = launches_ahead
        self.requests: dict[str, Request] = {}
        self.leases: dict[str, Request] = {}
        self.prefixes: dict[str, Prefix] = {}  # of leases, which come from here
        self.tree: set[bytes] = set()
        self.num_added = 0
        self.root = chain_root(
            model_fingerprint="toy",
            compute_dtype="float32",
            numerics="fast",
            kv_dtype="float32",
            block_size=block_size,
            cache_salt=b"",
        )
        self.indexer = KvIndexer(block_size, [self.root])
        self.far_indexer = KvIndexer(block_size, [self.root])

    def _engine(
        self, block_size: int, num_blocks: int, max_num_seqs: int
    ) -> tuple[Engine, GroupedToyRunner]:
        return make_grouped_engine(
            self.windows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=self.tokens,
            report_block_tokens=True,
        )

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        mode=st.sampled_from([Mode.LOCAL, Mode.WAITING_FOR_REMOTE_KV]),
        max_tokens=st.integers(1, 8),
        prefix_blocks=st.sampled_from([0, 0, 1, 2, 5]),
        parent=st.integers(0, 4),
        budget=st.sampled_from([None, None, KvBudget(6, 2), KvBudget(9, 0), KvBudget(4, 3)]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        mode: Mode,
        max_tokens: int,
        prefix_blocks: int,
        parent: int,
        budget: KvBudget | None,
    ) -> None:
        has_budgets = None in self.windows and STATE not in self.windows
        budget = budget if has_budgets else None
        prompt = [7] * min(shared, MAX_MODEL_LEN - 1 - len(own)) + own
        self.num_added += 1
        spec = make_spec(
            str(self.num_added),
            prompt,
            mode=mode,
            max_tokens=max_tokens,
            prefix_blocks=prefix_blocks,
            fork_of=[*self.requests, "", "", "", "", ""][parent],
            kv_budget=budget,
        )
        num_tokens = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        self.enter(Request(spec, continuation(prompt, num_tokens, self.windows, budget=budget)))

    def enter(self, request: Request) -> None:
        spec = request.spec
        try:
            self.here.add(spec)
        except NeverFits:
            layout, budget = self.here.layout, spec.kv_budget
            capacity = (layout if budget is None else layout.under(budget)).tokens_max
            assert capacity is not None
            assert len(spec.token_ids) + spec.sampling.max_tokens > capacity
        else:
            self.requests[request.sequence_id] = request

    @precondition(lambda self: self.here.has_work() or self.there.has_work())
    @rule(times=st.sampled_from([1, 1, 2, 50]))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.here.has_work():
                self.take(self.here.step())
            if self.there.has_work():
                self.take_from_peer(self.there.step())
            self.whole()

    def take(self, report: StepReport) -> None:
        self.take_held(report)
        for reserved in report.reserved:
            self.take_reserved(reserved)
        for new in report.new_tokens:
            request = self.requests[new.sequence_id]
            request.made += new.token_ids
            assert request.made == request.expected[: len(request.made)]
            if new.finish_reason:
                assert request.made == request.expected
                del self.requests[new.sequence_id]
        for stored in report.stored:
            assert stored.block_hash not in self.tree
            self.tree.add(stored.block_hash)
        for block_hash in report.removed:
            self.tree.remove(block_hash)
        assert self.tree == set(self.here.block_hashes(b"", b""))
        self.indexer.follow(report)
        if None in self.windows:
            self.indexer.check_chains(self.tree)

    def take_reserved(self, reserved: Reserved) -> None:
        """The other engine is asked for the rest: to compute it, or to hold what it has."""
        request = self.requests[reserved.sequence_id]
        spec = request.spec
        request.num_cached = reserved.num_cached_tokens // self.here.layout.block_size
        request.targets, request.num_came = list(reserved.block_ids), 0
        request.lent_at = f"{spec.sequence_id}-{self.num_added}-{len(self.leases)}"
        self.num_added += 1
        self.leases[request.lent_at] = request
        if spec.mode is Mode.WAITING_FOR_REMOTE_KV:
            token_ids = spec.token_ids
            lease = make_spec(
                request.lent_at,
                token_ids,
                mode=Mode.PREFILL_ONLY,
                first_wanted_block=request.num_cached,
                prefix_blocks=spec.prefix_blocks,
                kv_budget=spec.kv_budget,
            )
            self.there.add(lease)
        else:
            hashes = self._prefix_hashes(spec)
            self.there.hold_prefix(request.lent_at, hashes, request.num_cached, self.load_s_max)

    def _prefix_hashes(self, spec: SequenceSpec) -> list[bytes]:
        block_size = self.here.layout.block_size
        num_blocks = min(spec.prefix_blocks, (len(spec.token_ids) - 1) // block_size)
        return hash_blocks(self.root, spec.token_ids, block_size)[:num_blocks]

    def take_held(self, report: StepReport) -> None:
        """The peer gets the prefix of a lease, or what it asked for is not here."""
        for run in report.final_blocks:
            prefix = self.prefixes[run.sequence_id]
            assert run.first_block == prefix.num_cached + prefix.num_came
            for block_id in run.block_ids:
                if prefix.lease_id in self.leases:
                    target = self.far_runner.block(
                        self.there.layout, prefix.targets[prefix.num_came]
                    )
                    target.copy_(self.runner.block(self.here.layout, block_id))
                prefix.num_came += 1
        for held in report.held:
            prefix = self.prefixes.pop(held.sequence_id)
            assert prefix.num_came in (0, len(prefix.targets))
            if prefix.lease_id in self.leases:
                came = max(prefix.num_cached, held.num_blocks)
                self.there.continue_prefill(prefix.lease_id, came)
            self.here.remove(held.sequence_id)

    def take_from_peer(self, report: StepReport) -> None:
        self.far_indexer.follow(report)
        for reserved in report.reserved:
            request, name = self.leases[reserved.sequence_id], f"prefix-{reserved.sequence_id}"
            num_cached = reserved.num_cached_tokens // self.there.layout.block_size
            self.prefixes[name] = Prefix(reserved.sequence_id, reserved.block_ids, num_cached)
            hashes = self._prefix_hashes(request.spec)
            self.here.hold_prefix(name, hashes, num_cached, self.load_s_max)
        for run in report.final_blocks:
            self.take_run(run)
        for prefilled in report.prefilled:
            if request := self.leases.pop(prefilled.sequence_id, None):
                assert prefilled.first_token_id == request.expected[len(request.made)]
                assert request.num_came == len(request.targets or [])
                request.made.append(prefilled.first_token_id)
                self._settle(request)
                self.here.commit(request.sequence_id, prefilled.first_token_id)
                self.there.remove(prefilled.sequence_id)
        for held in report.held:
            if request := self.leases.pop(held.sequence_id, None):
                came = max(request.num_cached, held.num_blocks)
                assert request.num_came in (0, len(request.targets or []))
                self._settle(request)
                self.here.continue_prefill(request.sequence_id, came)
                self.there.remove(held.sequence_id)

    def take_run(self, run: FinalBlocks) -> None:
        request = self.leases.get(run.sequence_id)
        if request is None:
            return
        assert request.targets is not None
        assert run.first_block == request.num_cached + request.num_came
        for block_id in run.block_ids:
            target = self.runner.block(self.here.layout, request.targets[request.num_came])
            target.copy_(self.far_runner.block(self.there.layout, block_id))
            request.num_came += 1

    def _settle(self, request: Request) -> None:
        request.targets, request.lent_at = None, ""

    @precondition(lambda self: any(r.targets is not None for r in self.requests.values()))
    @rule(data=st.data(), drops_lease=st.booleans())
    def give_up(self, data: st.DataObject, drops_lease: bool) -> None:
        """A pull fails: the rest is computed here, some blocks maybe still being written."""
        waiting = [r for r in self.requests.values() if r.targets is not None]
        request = data.draw(st.sampled_from(waiting))
        assert request.targets is not None
        targets = sorted(request.targets)
        unsafe = data.draw(st.sets(st.sampled_from(targets), max_size=3)) if targets else set()
        self.there.remove(request.lent_at)
        self.leases.pop(request.lent_at, None)
        if drops_lease:
            del self.requests[request.sequence_id]
            self.here.remove(request.sequence_id, unsafe)
        elif request.spec.mode is Mode.WAITING_FOR_REMOTE_KV:
            spec = make_spec(
                request.sequence_id,
                request.spec.token_ids + request.made,
                num_prompt_tokens=request.spec.num_prompt_tokens,
                max_tokens=request.spec.sampling.max_tokens,
                kv_budget=request.spec.kv_budget,
            )
            if unsafe or request.num_came:
                self.here.restart(spec, unsafe)
            else:
                self.here.start_local_prefill(request.sequence_id)
        else:
            self.here.continue_prefill(request.sequence_id, request.num_cached, unsafe)
        self._settle(request)
        self.here.unquarantine(unsafe)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.requests.values())))
        del self.requests[request.sequence_id]
        self.leases.pop(request.lent_at, None)
        if request.lent_at:
            self.there.remove(request.lent_at)
        self.here.remove(request.sequence_id)

    @rule()
    def reset(self) -> None:
        self.here.reset_prefix_cache()

    @invariant()
    def whole(self) -> None:
        for engine in (self.here, self.there):
            engine.check_integrity()
            check_bounds(engine, self.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "here"):
            return
        for _ in range(2000):
            if not self.requests:
                break
            self.step(1)
        assert not self.requests, "somebody never ends"
        while self.here.has_work() or self.there.has_work():
            self.step(1)
        for engine in (self.here, self.there):
            assert engine.load().blocks_used == engine.load().blocks_quarantined == 0


class LongPair(Pair):
    """The same with many more examples: each run draws others."""


Pair.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestPair = Pair.TestCase
LongPair.TestCase.settings = settings(max_examples=1000, stateful_step_count=30, deadline=None)
TestLong = pytest.mark.timeout(3600)(pytest.mark.slow(LongPair.TestCase))


def test_the_load_has_the_blocks_of_each_pool() -> None:
    engine, _ = make_grouped_engine((None, 9), num_blocks=16, max_num_seqs=2)
    engine.add(make_spec("a", list(range(40)), max_tokens=5))
    load = engine.step().load
    full, window = load.groups
    assert (full.blocks_used, full.sequence_blocks_max) == (10, 0)
    assert (window.blocks_used, window.sequence_blocks_max) == (2, 3)
    assert full.blocks_total + window.blocks_total == load.blocks_total
    assert full.blocks_used + window.blocks_used == load.blocks_used
    plain, _ = make_grouped_engine((None,), num_blocks=16)
    assert plain.load().groups == ()


def test_layouts_that_are_divided_otherwise_are_told_apart() -> None:
    pool = BlockLayout(8, 1, 2, 4, 8, "float32")
    divided = [
        KvLayout.of_one(pool),
        KvLayout((KvGroup((0, 1), 16, pool),)),
        KvLayout((KvGroup((0, 1), 20, pool),)),
        KvLayout((KvGroup((0, 1), None, pool), KvGroup((2, 3), 16, pool))),
        KvLayout((KvGroup((0, 2), None, pool), KvGroup((1, 3), 16, pool))),
    ]
    assert len({layout.describe() for layout in divided}) == len(divided)
    assert divided[0].describe() == pool.describe()  # as workers of the version before say it


@pytest.mark.parametrize("windows", [(None, 8), (8,)])
def test_a_shared_prompt_hits_again_after_the_window_has_passed_it(windows: Windows) -> None:
    engine, _ = make_grouped_engine(windows, num_blocks=60, max_num_seqs=2, max_tokens_per_step=8)
    shared = [1, 2, 3, 4] * 10
    for name, own in (("a", 5), ("b", 6), ("c", 7)):
        outcome = drive_all(engine, make_spec(name, [*shared, own], max_tokens=20))
        assert outcome.token_ids[name] == continuation([*shared, own], 20, windows)
        assert outcome.ends[name].num_cached_tokens == (0 if name == "a" else 40)


def test_passed_blocks_go_first_and_the_oldest_of_them_before_others() -> None:
    engine, _ = make_grouped_engine((None, 8), num_blocks=24, max_num_seqs=1, max_tokens_per_step=8)
    drive_all(engine, make_spec("a", [1, 2, 3, 4] * 10, max_tokens=2))
    before = engine.block_hashes(b"", b"")
    drive_all(engine, make_spec("b", [5] * 24, max_tokens=2))
    gone = [block_hash for block_hash in before if block_hash not in engine.block_hashes(b"", b"")]
    assert gone
    assert gone == before[: len(gone)], "a later depth went before an earlier one"
