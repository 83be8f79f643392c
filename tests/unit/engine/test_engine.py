"""Engine on the toy runner: sequences that it prefills and decodes itself, with exact block ids."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineConfig
from tandem.common.process.priority import LowPriority
from tandem.common.worker_load import WorkerLoad
from tandem.engine.engine import Engine
from tandem.engine.types import (
    Mode,
    NewTokens,
)
from tandem.errors import (
    ConfigError,
    InternalError,
    NeverFits,
    QueueFull,
)
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.toy_runner import ToyRunner, continuation, kv_of

PROMPT = [3, 1, 4, 1, 5, 9]  # one full block of 4 and half of the next


def test_a_sequence_knows_how_many_prompt_tokens_are_computed_before_it() -> None:
    engine, _ = make_engine()
    for name in ("a", "b", "c"):
        engine.add(make_spec(name, [ord(name) % 50, *PROMPT], max_tokens=2))
    admitted = engine.step().admitted
    assert [(one.sequence_id, one.tokens_ahead) for one in admitted] == [
        ("a", 0),
        ("b", 7),
        ("c", 14),
    ]
    engine.add(make_spec("d", PROMPT, max_tokens=2))
    assert [one.tokens_ahead for one in engine.step().admitted] == [0], "the others decode"


def test_a_sequence_is_prefilled_decoded_and_frees_its_blocks() -> None:
    engine, _ = make_engine()
    engine.add(make_spec("a", PROMPT, max_tokens=5))
    assert engine.has_work()
    first = engine.step()
    assert (first.step, first.num_prefill_tokens, first.num_decode_tokens) == (1, 6, 0)
    assert first.num_prefill_context_tokens == 0 + 1 + 2 + 3 + 4 + 5
    assert engine.block_ids("a") == [0, 1]
    assert first.load == WorkerLoad(
        num_running=1,
        num_running_slots=64,
        chunk_tokens=511,
        blocks_total=16,
        blocks_used=2,
        tokens_wasted=1,
    )
    assert first.stats.blocks_free == 14
    outcome = Outcome()
    outcome.take(first)
    drive(engine, outcome)
    assert outcome.token_ids["a"] == continuation(PROMPT, 5)
    assert outcome.ends["a"].finish_reason == "length"
    assert [r.num_decode_tokens for r in outcome.reports] == [0, 1, 1, 1, 1]
    assert [r.num_decode_context_tokens for r in outcome.reports] == [0, 6, 7, 8, 9]
    # 6 + 5 tokens, the last without KV: two full blocks stay as prefix, the third is free.
    assert engine.load() == WorkerLoad(
        num_running_slots=64,
        chunk_tokens=512,
        queued_s=None,
        blocks_total=16,
        blocks_cached=2,
    )
    assert engine.stats().blocks_free == 14


def test_the_same_prompt_again_computes_its_last_token() -> None:
    engine, _ = make_engine()
    outcome = drive_all(engine, make_spec("a", PROMPT))
    engine.add(make_spec("b", PROMPT))
    outcome.take(engine.step())
    assert engine.block_ids("b")[0] == 0
    assert outcome.reports[-1].num_prefill_tokens == 1
    drive(engine, outcome)
    assert outcome.ends["b"].num_cached_tokens == 5
    assert outcome.token_ids["b"] == outcome.token_ids["a"]


def test_a_prompt_cached_whole_computes_its_last_token_in_a_block_of_its_own() -> None:
    engine, runner = make_engine()
    prompt = [*PROMPT, 2, 6]
    drive_all(engine, make_spec("a", prompt))
    before = runner.kv.clone()
    engine.add(make_spec("b", prompt))
    report = engine.step()
    assert report.num_prefill_tokens == 1
    assert report.new_tokens == [NewTokens("b", continuation(prompt, 1), "", CachedTokens(7))]
    # It got the block that was there already, and its own copy is free again.
    assert engine.block_ids("b") == [0, 1]
    assert bool((runner.kv[[0, 1]] == before[[0, 1]]).all())
    assert report.stored == []


def test_another_salt_shares_nothing() -> None:
    engine, _ = make_engine()
    drive_all(engine, make_spec("a", PROMPT))
    outcome = drive_all(engine, make_spec("b", PROMPT, cache_salt=b"tenant"))
    assert outcome.ends["b"].num_cached_tokens == 0


def test_long_prompts_are_prefilled_in_chunks_beside_decode() -> None:
    engine, _ = make_engine(max_tokens_per_step=4)
    engine.add(make_spec("a", [7], max_tokens=8))
    outcome = Outcome()
    outcome.take(engine.step())
    engine.add(make_spec("b", PROMPT, max_tokens=2))
    drive(engine, outcome)
    loads = [r.load for r in outcome.reports[:4]]
    assert [(load.num_decoding, load.num_in_prefill) for load in loads] == [
        *((1, 0), (1, 1), (2, 0), (1, 0)),
    ]
    work = [(r.num_decode_tokens, r.num_prefill_tokens) for r in outcome.reports]
    assert work[:4] == [(0, 1), (1, 3), (1, 3), (2, 0)]
    assert outcome.token_ids == {"a": continuation([7], 8), "b": continuation(PROMPT, 2)}


def test_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    engine, _ = make_engine()
    made = continuation(PROMPT, 5)
    stop = next(i for i in range(1, 5) if made[i] not in made[:i])
    outcome = drive_all(engine, make_spec("a", PROMPT, stop_token_ids=[made[stop]]))
    assert outcome.token_ids["a"] == made[: stop + 1]
    assert outcome.ends["a"].finish_reason == "stop"


def test_the_context_ends_a_sequence_with_length() -> None:
    engine, _ = make_engine(max_model_len=8)
    outcome = drive_all(engine, make_spec("a", PROMPT, max_tokens=50))
    assert outcome.token_ids["a"] == continuation(PROMPT, 2)
    assert outcome.ends["a"].finish_reason == "length"


def test_a_line_of_a_batch_reports_its_tokens_together() -> None:
    engine, _ = make_engine()
    line = make_spec("line", PROMPT, max_tokens=40, is_batch=True)
    engine.add(line)
    outcome = drive(engine)
    assert outcome.token_ids["line"] == continuation(PROMPT, 40)
    news = [new for report in outcome.reports for new in report.new_tokens]
    assert [len(new.token_ids) for new in news] == [1, 1, 32, 6]
    engine.add(line)
    for _ in range(5):
        engine.step()
    engine.remove("line")
    # The tokens that were not reported are lost with the sequence, and it is moved without them.
    engine.add(msgspec.structs.replace(line, token_ids=PROMPT + continuation(PROMPT, 2)))
    assert drive(engine).token_ids["line"] == continuation(PROMPT, 40)[2:]


def test_a_step_of_lines_only_has_a_lower_priority() -> None:
    engine, runner = make_engine()
    priorities: list[int] = []
    forward = runner.forward

    def watched(*args: Any) -> Any:
        priorities.append(os.getpriority(os.PRIO_PROCESS, 0))
        return forward(*args)

    runner.forward = watched  # type: ignore[method-assign]
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with LowPriority():
        lower = os.getpriority(os.PRIO_PROCESS, 0)
    engine.add(make_spec("line", PROMPT, max_tokens=2, is_batch=True))
    drive(engine)
    assert priorities == [lower, lower]
    engine.add(make_spec("other", PROMPT, max_tokens=2))
    drive(engine)
    assert priorities[2:] == [before, before]


def test_a_moved_sequence_goes_on_from_its_made_tokens() -> None:
    engine, _ = make_engine()
    made = continuation(PROMPT, 5)
    spec = make_spec("a", PROMPT + made[:2], num_prompt_tokens=6, max_tokens=5)
    assert drive_all(engine, spec).token_ids["a"] == made[2:]


def test_a_moved_sequence_that_is_over_is_reported_so() -> None:
    engine, _ = make_engine()
    made = continuation(PROMPT, 5)
    engine.add(make_spec("a", PROMPT + made, num_prompt_tokens=6, max_tokens=5))
    assert engine.has_work()
    assert engine.step().new_tokens == [NewTokens("a", [], "length")]
    assert not engine.has_work()


class TestPreemption:
    def test_the_youngest_gives_way_and_all_come_out_right(self) -> None:
        engine, _ = make_engine(num_blocks=6)
        prompts = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [9, 8, 7, 6, 5, 4, 3]}
        for name, prompt in prompts.items():
            engine.add(make_spec(name, prompt, max_tokens=14))
        outcome = drive(engine)
        assert outcome.token_ids == {n: continuation(p, 14) for n, p in prompts.items()}
        assert outcome.ends["a"].num_preemptions == 0
        assert outcome.ends["b"].num_preemptions >= 1
        assert outcome.ends["b"].num_cached_tokens == 0  # its own blocks do not count as reuse
        assert list(outcome.ends) == ["a", "b"]

    def test_many_sequences_in_a_pool_for_one_all_end(self) -> None:
        engine, _ = make_engine(num_blocks=4, max_tokens_per_step=8)
        prompts = {str(i): [i, i + 1, i + 2] for i in range(8)}
        for name, prompt in prompts.items():
            engine.add(make_spec(name, prompt, max_tokens=13))
        outcome = drive(engine)
        assert outcome.token_ids == {n: continuation(p, 13) for n, p in prompts.items()}
        assert sum(end.num_preemptions for end in outcome.ends.values()) > 0

    def test_blocks_lent_to_a_peer_are_never_taken(self) -> None:
        engine, runner = make_engine(num_blocks=4)
        engine.add(make_spec("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9))
        engine.step()
        engine.add(make_spec("peer", PROMPT, mode=Mode.PREFILL_ONLY))
        outcome = drive(engine)
        lent = engine.block_ids("peer")
        assert runner.read(lent, 6) == kv_of(PROMPT)
        assert "a" not in outcome.ends
        assert engine.load().num_waiting == 1
        engine.remove("peer")
        assert engine.has_work()
        assert len(outcome.token_ids["a"]) < 8
        drive(engine, outcome)
        assert outcome.token_ids["a"] == continuation([1, 2, 3, 4, 5, 6, 7], 9)[1:]
        assert outcome.ends["a"].num_preemptions == 1


class TestRefusal:
    def test_what_does_not_fit_now_waits(self) -> None:
        engine, _ = make_engine(num_blocks=2)
        engine.add(make_spec("held", PROMPT, mode=Mode.PREFILL_ONLY))
        engine.add(make_spec("a", [1], max_tokens=1))
        drive(engine)
        assert engine.load().num_waiting == 1
        assert not engine.has_work()
        engine.remove("held")
        assert drive(engine).token_ids["a"] == continuation([1], 1)

    def test_full_queue(self) -> None:
        engine, _ = make_engine(queue_max=1)
        engine.add(make_spec("a", PROMPT))
        with pytest.raises(QueueFull) as caught:
            engine.add(make_spec("b", PROMPT))
        assert caught.value.retry_after_s

    def test_what_is_refused_leaves_nothing_behind(self) -> None:
        engine, _ = make_engine(num_blocks=2)
        with pytest.raises(NeverFits):
            engine.add(make_spec("a", PROMPT, max_tokens=3))
        assert not engine.has_work()
        engine.add(make_spec("a", PROMPT, max_tokens=2))

    def test_a_restart_that_is_refused_ends_the_sequence_with_its_blocks_fenced(self) -> None:
        engine, _ = make_engine(num_blocks=2)
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV, max_tokens=2))
        engine.step()
        with pytest.raises(NeverFits):
            engine.restart(make_spec("a", PROMPT, max_tokens=3), unsafe_blocks=[1])
        engine.check_integrity()
        load = engine.load()
        assert (load.blocks_used, load.blocks_quarantined, load.num_pulls) == (0, 1, 0)

    def test_a_live_id_and_an_unknown_one(self) -> None:
        engine, _ = make_engine()
        engine.add(make_spec("a", PROMPT))
        with pytest.raises(InternalError, match="a is already on this engine"):
            engine.add(make_spec("a", PROMPT))
        with pytest.raises(InternalError, match="no sequence b"):
            engine.commit("b", 1)
        with pytest.raises(InternalError, match="is waiting; it must be"):
            engine.start_local_prefill("a")
        engine.remove("b")

    def test_a_pool_without_a_block(self) -> None:
        config = EngineConfig(model="toy", kv_bytes_max=8)
        with pytest.raises(ConfigError, match="--kv-memory is 8"):
            Engine(config, ToyRunner(block_size=16), "toy")


@pytest.mark.parametrize("num_steps", range(4))
def test_removal_in_each_phase_frees_everything(num_steps: int) -> None:
    engine, _ = make_engine(max_tokens_per_step=4)
    engine.add(make_spec("a", PROMPT))
    for _ in range(num_steps):
        engine.step()
    engine.remove("a")
    engine.check_integrity()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.blocks_used) == (0, 0, 0)
