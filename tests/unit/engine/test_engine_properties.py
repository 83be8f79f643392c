"""Any order of calls from outside on tiny pools gives the oracle's tokens and breaks no block.

The rules about sequences are in tests/engine_machine.py; here those about chains join them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tandem.common.block_hash import chain_root, hash_blocks
from tandem.common.config.engine import EngineConfig
from tandem.engine.types import FinalBlocks, Reserved, StepReport
from tests.engine_machine import EngineMachine, prompts
from tests.toy_runner import kv_of

CHAINS_MAX = 2


@dataclass
class PinnedPrefix:
    """A consumer's."""

    token_ids: list[int]
    first_wanted: int
    lent: list[int] = field(default_factory=list)
    num_held: int | None = None


@dataclass
class ImportedBlocks:
    """One that a peer fills."""

    token_ids: list[int]
    num_cached_blocks: int | None = None  # None: not reported yet


class Machine(EngineMachine):
    load_s_max = 0.0  # for which a consumer lets the engine load blocks from tiers

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, PinnedPrefix] = {}
        self.imported: dict[str, ImportedBlocks] = {}

    def hashes(self, token_ids: list[int]) -> list[bytes]:
        root = chain_root(
            model_fingerprint="toy",
            compute_dtype="float32",
            numerics=EngineConfig(model="toy").numerics,
            kv_dtype="float32",
            block_size=self.engine.layout.block_size,
        )
        return hash_blocks(root, token_ids, self.engine.layout.block_size)

    @precondition(lambda self: len(self.held) + len(self.imported) < CHAINS_MAX)
    @rule(token_ids=prompts, first_wanted=st.none() | st.integers(0, 3))
    def take_chain(self, token_ids: list[int], first_wanted: int | None) -> None:
        """Holds it for a consumer that wants blocks from `first_wanted` on, or imports it."""
        sequence_id, hashes = self.new_id(), self.hashes(token_ids)
        if first_wanted is not None:
            self.engine.hold_prefix(sequence_id, hashes, first_wanted, self.load_s_max)
            self.held[sequence_id] = PinnedPrefix(token_ids, first_wanted)
            return
        num_cached = self.engine.load().blocks_cached
        self.engine.import_blocks(sequence_id, hashes)
        self.imported[sequence_id] = ImportedBlocks(token_ids)
        num_referenced = len(self.engine.block_ids(sequence_id))
        assert self.engine.load().blocks_cached >= num_cached - num_referenced, "it evicted"

    @precondition(lambda self: self.imported)
    @rule(data=st.data())
    def commit_import(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.imported)))
        chain = self.imported.pop(sequence_id)
        table = self.engine.block_ids(sequence_id)
        if chain.num_cached_blocks is None:
            num_blocks, unsafe = len(table), []
            self.runner.fill(table, self.first_tokens(chain.token_ids, len(table)), 0)
        else:
            num_blocks = data.draw(st.integers(chain.num_cached_blocks, len(table)))
            came = self.first_tokens(chain.token_ids, num_blocks)
            self.runner.fill(table, came, chain.num_cached_blocks)
            unsafe = self.draw_unsafe(data, table[num_blocks:])
        self.engine.commit_import(sequence_id, num_blocks, unsafe)

    @precondition(lambda self: self.held or self.imported)
    @rule(data=st.data())
    def remove_chain(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted([*self.held, *self.imported])))
        self.held.pop(sequence_id, None)
        chain = self.imported.pop(sequence_id, None)
        unsafe = []
        if chain and chain.num_cached_blocks is not None:
            own = self.engine.block_ids(sequence_id)[chain.num_cached_blocks :]
            unsafe = self.draw_unsafe(data, own)
        self.engine.remove(sequence_id, unsafe)

    @invariant()
    def hot_prefixes_are_what_is_stored(self) -> None:
        blocks_max, stored = self.num_added % 6, self.parents()
        chains = self.engine.hot_prefixes(blocks_max)
        for chain in chains:
            for parent, child in pairwise(chain):
                assert stored[child] == parent
        assert len({block for chain in chains for block in chain}) == min(blocks_max, len(stored))
        assert set(self.engine.block_hashes(b"", b"")) == set(stored)

    def take(self, report: StepReport) -> None:
        super().take(report)
        for held in report.held:
            chain = self.held[held.sequence_id]
            chain.num_held = held.num_blocks
            assert len(chain.lent) == max(0, held.num_blocks - chain.first_wanted)

    def take_reserved(self, reserved: Reserved) -> None:
        chain = self.imported.get(reserved.sequence_id)
        if chain is None:
            super().take_reserved(reserved)
            return
        chain.num_cached_blocks = reserved.num_cached_tokens // self.engine.layout.block_size
        table = self.engine.block_ids(reserved.sequence_id)
        assert table[chain.num_cached_blocks :] == reserved.block_ids
        self.runner.scribble(reserved.block_ids)

    def take_run(self, run: FinalBlocks) -> None:
        chain = self.held.get(run.sequence_id)
        if chain is None:
            super().take_run(run)
            return
        assert run.first_block == chain.first_wanted
        chain.lent += run.block_ids

    @invariant()
    def held_blocks_keep_their_content(self) -> None:
        for chain in self.held.values():
            if chain.lent:
                block_size = self.engine.layout.block_size
                start = chain.first_wanted * block_size
                values = kv_of(chain.token_ids)[start : start + len(chain.lent) * block_size]
                assert self.runner.read(chain.lent, len(values)) == values

    def end_all(self) -> None:
        for sequence_id in [*self.held, *self.imported]:
            self.engine.remove(sequence_id)
        super().end_all()

    def first_tokens(self, token_ids: list[int], num_blocks: int) -> list[int]:
        return token_ids[: num_blocks * self.engine.layout.block_size]

    def parents(self) -> dict[bytes, bytes]:
        """Returns the parent of every block that the engine finds by hash, reported or not."""
        pool = self.engine._kv.pools[0]
        new = {block_hash: block.parent_hash for block_hash, block in pool._events._stored.items()}
        stored = {**self.tree, **new}
        return {
            hash_: parent for hash_, parent in stored.items() if hash_ not in pool._events._removed
        }


class LongMachine(Machine):
    """The same with many more examples: each run draws others."""


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestEngineMachine = Machine.TestCase
LongMachine.TestCase.settings = settings(max_examples=3000, stateful_step_count=50, deadline=None)
TestLong = pytest.mark.timeout(3600)(pytest.mark.slow(LongMachine.TestCase))
