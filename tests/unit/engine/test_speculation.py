"""Sequences that speculate get the same tokens, whatever is proposed, and no block leaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tandem.engine.engine import Engine
from tandem.engine.types import SequenceSpec
from tests.engine_driver import drive_all, make_engine, make_spec
from tests.engine_machine import MAX_MODEL_LEN, EngineMachine
from tests.grouped_toy import STATE, GroupedToyRunner, Windows, group_values, make_grouped_engine
from tests.grouped_toy import continuation as grouped_continuation
from tests.scripted_drafts import AlwaysSpeculator, speculate
from tests.toy_runner import VOCABULARY, continuation
from tests.unit.engine.test_kv_groups import ALL_WINDOWS, BLOCK_SIZES, Pair
from tests.unit.engine.test_kv_groups import MAX_MODEL_LEN as PAIR_MODEL_LEN


def toy_oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
    """The tokens that the toy runner samples, without the sequence's last token."""
    max_tokens = spec.sampling.max_tokens
    assert max_tokens is not None
    left = min(MAX_MODEL_LEN, spec.num_prompt_tokens + max_tokens) - len(token_ids)
    stops = spec.sampling.stop_token_ids or ()
    return continuation(list(token_ids), left, stops)[:-1]


class Machine(EngineMachine):
    """All calls in any order, while sequences speculate."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 20),
        max_num_seqs=st.integers(1, 4),
        max_tokens_per_step=st.integers(1, 24),
        launches_ahead=st.booleans(),
        seed=st.integers(0, 1 << 16),
        wrong=st.sampled_from([0.0, 0.2, 0.7]),
    )
    def start(self, *, seed: int, wrong: float, **more: Any) -> None:
        super().start(**more)
        speculator = AlwaysSpeculator(toy_oracle, VOCABULARY, wrong=wrong, seed=seed)
        speculate(self.engine, speculator)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = pytest.mark.timeout(300)(Machine.TestCase)


class StatesMachine(Pair):
    """Two engines with states, in any order, while sequences speculate. A state that took in a
    rejected token would change all later tokens, also those of requests that resume after it."""

    seed, wrong = 0, 0.0

    @initialize(
        windows=st.sampled_from([each for each in ALL_WINDOWS if STATE in each]),
        block_size=st.sampled_from(BLOCK_SIZES),
        num_blocks=st.integers(8, 40),
        max_num_seqs=st.integers(1, 4),
        tokens=st.integers(1, 9),
        launches_ahead=st.booleans(),
        seed=st.integers(0, 1 << 16),
        wrong=st.sampled_from([0.0, 0.2, 0.7]),
    )
    def start(self, *, seed: int = 0, wrong: float = 0.0, **more: Any) -> None:
        self.seed, self.wrong = seed, wrong
        super().start(**more)

    def oracle(self, spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        expected = self.requests[spec.sequence_id].expected
        return expected[len(token_ids) - spec.num_prompt_tokens : -1]

    def _engine(
        self, block_size: int, num_blocks: int, max_num_seqs: int
    ) -> tuple[Engine, GroupedToyRunner]:
        engine, runner = make_grouped_engine(
            self.windows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=PAIR_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=self.tokens,
            report_block_tokens=True,
            speculative_config="auto",
        )
        speculator = AlwaysSpeculator(self.oracle, VOCABULARY, wrong=self.wrong, seed=self.seed)
        speculate(engine, speculator)
        return engine, runner


StatesMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestStatesMachine = pytest.mark.timeout(300)(StatesMachine.TestCase)


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("windows", [(None, STATE), (None, 5, STATE), (7, STATE)], ids=str)
def test_a_rejected_token_never_changes_a_state(windows: Windows, wrong: float) -> None:
    """Neither a running nor a frozen one. Only the slots of sequences and scratch slots change."""
    engine, runner = make_grouped_engine(
        windows, num_blocks=60, max_num_seqs=3, speculative_config="auto"
    )
    specs = [make_spec(f"{at}", [at, 1, 2, 3], max_tokens=40) for at in range(3)]
    expected = {
        spec.sequence_id: grouped_continuation(spec.token_ids, 40, windows) for spec in specs
    }

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        return expected[spec.sequence_id][len(token_ids) - 4 : -1]

    speculator = AlwaysSpeculator(oracle, VOCABULARY, wrong=wrong, seed=3)
    speculate(engine, speculator)
    state = windows.index(STATE)
    for spec in specs:
        engine.add(spec)
    made: dict[str, list[int]] = {}
    while engine.has_work():
        for new in engine.step().new_tokens:
            made.setdefault(new.sequence_id, []).extend(new.token_ids)
        engine.check_integrity()
        pool = engine._kv.pools[state]
        assert engine._kv.num_scratch == 3
        for sequence in engine._sequences.values():
            if not sequence.num_computed_tokens:
                continue
            after = group_values(sequence.token_ids, STATE)
            slot = sequence.tables.ids[state][0]
            assert state_in(runner, state, slot) == after[sequence.num_computed_tokens - 1]
            for depth, block_hash in enumerate(sequence.block_hashes, 1):
                if (frozen := pool.find(block_hash)) is not None:
                    assert state_in(runner, state, frozen) == after[depth * 4 - 1]
    assert made == expected
    stats = speculator.stats
    assert stats.num_draft_tokens > 30
    assert (stats.num_accepted_tokens > 30) == (wrong < 1)
    assert (stats.num_accepted_tokens < stats.num_draft_tokens) == (wrong > 0)
    load = engine.load()
    assert load.blocks_used == 0
    assert load.blocks_total == load.blocks_cached + engine.stats().blocks_free


def state_in(runner: GroupedToyRunner, group: int, slot: int) -> int:
    high, low = runner.pools[group][slot].long().tolist()
    return int((high << 16) + low)


def test_proposals_cause_no_preemption_and_hold_no_block_between_steps() -> None:
    """A pool that has room for the answers, but not for proposals beside them."""
    specs = [make_spec(str(at), [at] * 3, max_tokens=9, cache_salt=b"%d" % at) for at in range(3)]

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        left = spec.num_prompt_tokens + 9 - len(token_ids)
        return continuation(list(token_ids), left)[:-1]

    engine, _ = make_engine(num_blocks=9, block_size=4)
    speculator = AlwaysSpeculator(oracle, VOCABULARY, wrong=0.5)
    speculate(engine, speculator)
    for spec in specs:
        engine.add(spec)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        for sequence in engine._sequences.values():
            assert len(sequence.block_table) <= -(-sequence.num_tokens // 4)
            assert not sequence.num_preemptions
    assert speculator.stats.num_accepted_tokens > 3


@pytest.mark.parametrize("seed", range(6))
def test_proposals_evict_no_cached_block(seed: int) -> None:
    """The pool has three FREE blocks, which the answer needs. All others have cached KV."""

    def oracle(spec: SequenceSpec, token_ids: Sequence[int]) -> list[int]:
        return continuation(list(token_ids), 8) if spec.sequence_id == "new" else []

    engine, _ = make_engine(num_blocks=8, block_size=4)
    speculator = AlwaysSpeculator(oracle, VOCABULARY, wrong=0.9, seed=seed)
    speculate(engine, speculator)
    drive_all(engine, make_spec("old", [*range(20, 40)], max_tokens=1))
    assert engine._kv.pools[0].num_cached == 5
    drive_all(engine, make_spec("new", [1, 2, 3, 4, 5, 6], max_tokens=6))
    assert engine._kv.pools[0].num_dropped == 0
    assert speculator.stats.num_draft_tokens > 0


def num_steps(engine: Engine, name: str, **more: Any) -> int:
    """The number of steps with a token of an answer without repeats."""
    made = drive_all(engine, make_spec(name, [3, 1, 2], max_tokens=40, **more))
    assert made.token_ids == {name: continuation([3, 1, 2], 40)}
    return sum(bool(report.new_tokens) for report in made.reports)


def test_answers_are_proposed_to_the_same_tenant_only_and_until_a_reset() -> None:
    engine, _ = make_engine(num_blocks=100, speculative_config="auto")
    engine._speculator.num_worthwhile = lambda gains, work: len(gains)  # type: ignore[method-assign]
    alone = num_steps(engine, "a", cache_salt=b"one")
    assert num_steps(engine, "b", cache_salt=b"one") < alone / 4
    assert num_steps(engine, "c", cache_salt=b"other") == alone
    assert num_steps(engine, "d", cache_salt=b"other") < alone / 4
    assert num_steps(engine, "e") == alone
    engine.reset_prefix_cache()
    assert num_steps(engine, "f", cache_salt=b"one") == alone


def test_no_answer_is_kept_if_the_setting_says_so() -> None:
    setting = '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}'
    engine, _ = make_engine(num_blocks=100, speculative_config=setting)
    engine._speculator.num_worthwhile = lambda gains, work: len(gains)  # type: ignore[method-assign]
    assert num_steps(engine, "a") == num_steps(engine, "b")
