"""States stay within their share of the KV memory at every step, whatever requests do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.engine import Engine
from tandem.engine.types import Mode
from tests.engine_driver import Outcome, drive_all, make_spec
from tests.grouped_toy import STATE, GroupedToyRunner, continuation, make_grouped_engine

WINDOWS = (None, STATE)
LAYOUT = GroupedToyRunner(WINDOWS, block_size=4).layout()
BLOCK_BYTES, SLOT_BYTES = (group.layout.block_bytes for group in LAYOUT.groups)


def check_states(engine: Engine, kv_bytes: int) -> None:
    """All states that anything may read or write are in slots of the pool: one running state of
    each admitted sequence, and frozen ones. The pool takes at most half of the memory."""
    pool = engine._kv.pools[1]
    admitted = [s for s in engine._sequences.values() if s.tables]
    running = [s.tables.ids[1][0] for s in admitted]
    frozen = [slot for slot, block_hash, _ in pool.copies() if block_hash is not None]
    assert len({*running}) == len(running)
    assert not {*running} & {*frozen}
    assert (len(running) + len(frozen)) * SLOT_BYTES <= kv_bytes // 2
    assert pool.num_blocks * SLOT_BYTES <= kv_bytes // 2
    assert engine.layout.pool_bytes <= kv_bytes
    engine.check_integrity()


def run(seed: int, num_steps: int, num_slots: int, max_num_seqs: int) -> tuple[int, int, int]:
    """Adds, forks and cancels random sequences, some of which compute prompts for a peer. Returns
    the numbers of preemptions, of evicted states, and of reused tokens."""
    rng = Random(seed)
    # With tiers the pool has at least one slot more.
    tiers = {"kv_host_bytes": 4096} if num_slots > 5 and rng.random() < 0.5 else {}
    kv_bytes = 2 * num_slots * SLOT_BYTES
    engine, runner = make_grouped_engine(
        WINDOWS,
        num_blocks=None,
        kv_bytes_max=kv_bytes,
        max_num_seqs=max_num_seqs,
        max_tokens_per_step=rng.choice((5, 20)),
        **tiers,
    )
    assert runner.kv.nbytes <= kv_bytes
    capacity = engine.layout.tokens_max
    assert capacity is not None
    outcome = Outcome()
    prompts: dict[str, Sequence[int]] = {}
    states: set[bytes] = set()
    held: list[str] = []  # PREFILL_ONLY sequences whose prompts are computed
    for number in range(num_steps):
        name = f"{number}"
        if rng.random() < 0.7 and len(engine._sequences) < 2 * max_num_seqs:
            parent = rng.choice([*engine._sequences, ""])
            prompt = list(range(rng.choice((3, 8, 17)))) + [rng.randrange(3)] * rng.randrange(1, 9)
            prompt = list(prompts[parent]) if parent and rng.random() < 0.5 else prompt
            mode = rng.choice((Mode.LOCAL, Mode.LOCAL, Mode.PREFILL_ONLY))
            max_tokens = min(rng.randrange(1, 50), capacity - len(prompt))
            prompts[name] = prompt
            engine.add(make_spec(name, prompt, mode=mode, max_tokens=max_tokens, fork_of=parent))
        if engine._sequences and rng.random() < 0.03:
            engine.remove(rng.choice([*engine._sequences]))
        if engine.has_work():
            outcome.take(engine.step())
            held += [prefilled.sequence_id for prefilled in outcome.reports[-1].prefilled]
        if held and rng.random() < 0.3:
            engine.remove(held.pop(0))
        check_states(engine, kv_bytes)
        states |= engine._kv.pools[1]._by_hash.keys()
    engine.close()
    for name, made in outcome.token_ids.items():
        assert made == continuation(prompts[name], len(made), WINDOWS)
    ends = outcome.ends.values()
    return (
        sum(end.num_preemptions for end in ends),
        len(states) - len(engine._kv.pools[1]._by_hash),
        sum(end.num_cached_tokens for end in ends),
    )


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_slots=st.integers(5, 12), max_num_seqs=st.integers(1, 6))
def test_any_requests(seed: int, num_slots: int, max_num_seqs: int) -> None:
    run(seed, 120, num_slots, max_num_seqs)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_slots=st.integers(5, 12), max_num_seqs=st.integers(1, 6))
def test_any_requests_for_long(seed: int, num_slots: int, max_num_seqs: int) -> None:
    run(seed, 400, num_slots, max_num_seqs)


def test_sequences_are_preempted_and_states_evicted_and_reused() -> None:
    """The runs above have all of these."""
    assert min(map(sum, zip(run(1, 200, 6, 6), run(4, 200, 8, 8), strict=True))) > 0


def test_sequences_that_await_states_leave_slots_for_the_prompts_of_peers() -> None:
    """Two workers with few slots prefill for each other at the same time. Each prompt resumes after
    a frozen state, so it needs as many slots as a prompt can need."""
    num_slots = 5
    kv_bytes = 2 * num_slots * SLOT_BYTES
    engines = [
        make_grouped_engine(WINDOWS, num_blocks=None, kv_bytes_max=kv_bytes, max_num_seqs=8)[0]
        for _ in range(2)
    ]
    prompt = list(range(21))
    for engine in engines:
        assert engine.layout.sizes[1] == num_slots
        drive_all(engine, make_spec("before", prompt[:12], max_tokens=1))
        for number in range(4):
            awaiting = make_spec(f"{number}", [number, *prompt], mode=Mode.WAITING_FOR_REMOTE_KV)
            engine.add(awaiting)
        assert len(engine.step().reserved) == 1
    for engine in engines:
        leased = make_spec("leased", prompt, mode=Mode.PREFILL_ONLY)
        outcome = drive_all(engine, leased)
        prefilled = [one for report in outcome.reports for one in report.prefilled]
        assert [each.num_cached_tokens for each in prefilled] == [12]
        check_states(engine, kv_bytes)
        # The next sequences are admitted when the first ones end.
        engine.remove("leased")
        engine.remove("0")
        engine.remove("1")
        assert [each.sequence_id for each in engine.step().reserved] == ["2"]


def test_the_smallest_pool_has_slots_for_two_workers_that_prefill_for_each_other() -> None:
    engine, _ = make_grouped_engine(WINDOWS, num_blocks=None, kv_bytes_max=6 * SLOT_BYTES)
    assert engine.layout.sizes[1] == 5
    engine, _ = make_grouped_engine(WINDOWS, num_blocks=8, max_num_seqs=1, kv_host_bytes=4096)
    assert engine.layout.sizes[1] == 6  # one for the copies of tiers


def test_scratch_slots_add_to_the_slots_of_sequences_and_frozen_states() -> None:
    def make(**more: Any) -> Engine:
        return make_grouped_engine(WINDOWS, num_blocks=8, max_num_seqs=2, **more)[0]

    plain, speculating = make(), make(speculative_config="auto")
    assert speculating.layout.sizes[1] == plain.layout.sizes[1] + 2
    assert speculating._kv.num_slots == plain._kv.num_slots
    assert speculating.stats().blocks_free == plain.stats().blocks_free
    assert speculating.load().groups == plain.load().groups
    assert speculating.load().blocks_used == 0
