"""Engine on the toy runner: sequences whose KV goes to a peer or comes from one, with exact ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tandem.common.cached_tokens import CachedTokens
from tandem.common.worker_load import WorkerLoad
from tandem.engine.scheduler.batch import StepBatch
from tandem.engine.types import (
    FinalBlocks,
    Mode,
    NewTokens,
    Prefilled,
    Reserved,
)
from tandem.errors import InternalError, QueueFull
from tests.engine_driver import drive, drive_all, make_engine, make_spec
from tests.toy_runner import continuation

PROMPT = [3, 1, 4, 1, 5, 9]  # one full block of 4 and half of the next


class TestForPeer:
    def test_blocks_are_reported_when_final_and_held_until_removed(self) -> None:
        engine, _ = make_engine(max_tokens_per_step=8)
        prompt = list(range(14))
        engine.add(make_spec("a", prompt, mode=Mode.PREFILL_ONLY))
        outcome = drive(engine)
        assert [r.num_prefill_tokens for r in outcome.reports] == [8, 4, 2]
        assert [r.final_blocks for r in outcome.reports] == [
            [FinalBlocks("a", 0, [0, 1])],
            [FinalBlocks("a", 2, [2])],
            [FinalBlocks("a", 3, [3])],
        ]
        assert outcome.reports[-1].prefilled == [Prefilled("a", continuation(prompt, 1)[0])]
        assert (engine.load().num_leases, engine.load().blocks_used) == (1, 4)
        engine.remove("a")
        assert (engine.load().num_leases, engine.load().blocks_used) == (0, 0)

    def test_cached_blocks_are_reported_before_anything_is_computed(self) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", list(range(8))))
        engine.add(make_spec("a", list(range(14)), mode=Mode.PREFILL_ONLY, first_wanted_block=1))
        report = engine.step()
        assert report.final_blocks == [FinalBlocks("a", 1, [1])]
        assert report.num_prefill_tokens == 0
        outcome = drive(engine)
        assert [r.final_blocks for r in outcome.reports] == [[FinalBlocks("a", 2, [3, 4])]]
        assert outcome.reports[-1].prefilled[0].num_cached_tokens == 8

    def test_blocks_are_told_while_the_step_goes_on_and_only_once(self) -> None:
        engine, runner = make_engine()
        drive_all(engine, make_spec("warm", list(range(8)), max_tokens=1))
        told: list[FinalBlocks] = []
        told_in_forward = []
        forward = runner.forward

        def watched(batch: StepBatch, on_kv_written: Callable[[], object]) -> torch.Tensor:
            told_in_forward.append(len(told))
            logits = forward(batch, on_kv_written)
            told_in_forward.append(len(told))
            return logits

        runner.forward = watched  # type: ignore[method-assign]
        engine.add(make_spec("a", list(range(14)), mode=Mode.PREFILL_ONLY, first_wanted_block=1))
        report = engine.step(told.extend)
        # What was cached goes first, and nothing waits for another step.
        assert told == [FinalBlocks("a", 1, [1]), FinalBlocks("a", 2, [2, 3])]
        assert told_in_forward == [1, 2]
        assert (report.final_blocks, len(report.prefilled)) == ([], 1)

    def test_unwanted_blocks_are_not_reported(self) -> None:
        engine, _ = make_engine()
        engine.add(make_spec("a", PROMPT, mode=Mode.PREFILL_ONLY, first_wanted_block=1))
        outcome = drive(engine)
        assert [r.final_blocks for r in outcome.reports] == [[FinalBlocks("a", 1, [1])]]


class TestAwaitKv:
    def test_reserves_waits_and_decodes_after_the_commit(self) -> None:
        engine, runner = make_engine()
        first, *rest = continuation(PROMPT, 5)
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        assert engine.step().reserved == [Reserved("a", 0, [0, 1])]
        assert not engine.has_work()
        table = engine.block_ids("a")
        assert table == [0, 1]
        runner.fill(table, PROMPT, 0)
        engine.commit("a", first)
        outcome = drive(engine)
        assert outcome.token_ids["a"] == rest
        assert len(outcome.reports[0].stored) == 1
        assert engine.load().blocks_used == 0

    def test_nothing_is_shared_before_the_commit(self) -> None:
        engine, runner = make_engine()
        engine._scheduler.early_reuse.wait_max_s = 0.0
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.step()
        outcome = drive_all(engine, make_spec("b", PROMPT))
        assert outcome.ends["b"].num_cached_tokens == 0
        runner.fill(engine.block_ids("a"), PROMPT, 0)
        engine.commit("a", continuation(PROMPT, 1)[0])
        assert engine.block_ids("a")[0] == 2  # what b stored meanwhile takes the pulled one's place
        assert drive(engine).token_ids["a"] == continuation(PROMPT, 5)[1:]

    def test_with_little_missing_it_is_prefilled_here_at_once(self) -> None:
        engine, _ = make_engine()
        spec = make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV, remote_prefill_min_tokens=7)
        outcome = drive_all(engine, spec)
        assert outcome.token_ids["a"] == continuation(PROMPT, 5)
        assert all(not r.reserved for r in outcome.reports)

    def test_only_the_missing_blocks_are_asked_for(self) -> None:
        engine, runner = make_engine()
        drive_all(engine, make_spec("warm", PROMPT))
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        assert engine.step().reserved == [Reserved("a", 4, [2], CachedTokens(4))]
        runner.fill(engine.block_ids("a"), PROMPT, 1)
        engine.commit("a", continuation(PROMPT, 1)[0])
        outcome = drive(engine)
        assert outcome.token_ids["a"] == continuation(PROMPT, 5)[1:]
        assert outcome.ends["a"].num_cached_tokens == 4

    def test_local_prefill_after_all(self) -> None:
        engine, _ = make_engine()
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.step()
        engine.start_local_prefill("a")
        assert drive(engine).token_ids["a"] == continuation(PROMPT, 5)

    def test_restart_quarantines_what_may_still_be_written(self) -> None:
        engine, runner = make_engine(num_blocks=4)
        made = continuation(PROMPT, 5)
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.step()
        spec = make_spec("a", PROMPT + made[:1], num_prompt_tokens=6)
        engine.restart(spec, unsafe_blocks=[1])
        assert engine.load().blocks_quarantined == 1
        engine.step()
        assert engine.block_ids("a") == [0, 2]
        runner.scribble([1])
        assert drive(engine).token_ids["a"] == made[2:]
        engine.unquarantine([1])
        assert engine.load().blocks_quarantined == 0
        engine.check_integrity()

    def test_restart_of_a_sequence_that_is_over_reports_its_end(self) -> None:
        engine, _ = make_engine()
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV, max_tokens=1))
        engine.step()
        spec = make_spec("a", PROMPT + continuation(PROMPT, 1), num_prompt_tokens=6, max_tokens=1)
        engine.restart(spec)
        assert engine.step().new_tokens == [NewTokens("a", [], "length")]
        assert engine.load().blocks_used == 0

    def test_a_commit_whose_token_ends_it_reports_the_end_alone(self) -> None:
        engine, runner = make_engine()
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV, stop_token_ids=[11]))
        engine.step()
        runner.fill(engine.block_ids("a"), PROMPT, 0)
        engine.commit("a", 11)
        assert engine.has_work()
        assert engine.step().new_tokens == [NewTokens("a", [], "stop")]
        assert engine.load() == WorkerLoad(
            num_running_slots=64, chunk_tokens=512, blocks_total=16, blocks_cached=1
        )
        assert engine.stats().blocks_free == 15

    def test_a_foreign_block_cannot_be_quarantined(self) -> None:
        engine, _ = make_engine()
        engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.step()
        with pytest.raises(InternalError, match=r"\[5\]"):
            engine.remove("a", unsafe_blocks=[1, 5])
        engine.check_integrity()


class TestPrefix:
    """LOCAL and PREFILL_ONLY with first blocks that come from a peer."""

    LONG = list(range(14))  # three full blocks of 4 and half of the fourth

    def test_continues_after_what_came_and_computes_the_rest(self) -> None:
        engine, runner = make_engine()
        engine.add(make_spec("a", self.LONG, prefix_blocks=2))
        report = engine.step()
        assert report.reserved == [Reserved("a", 0, [0, 1, 2, 3])]
        assert (report.load.num_pulls, report.load.queued_tokens) == (1, 6)
        assert not engine.has_work()
        runner.fill([0, 1], self.LONG[:8], 0)
        runner.scribble([2, 3])
        engine.continue_prefill("a", 2)
        outcome = drive(engine)
        assert outcome.token_ids["a"] == continuation(self.LONG, 5)
        assert outcome.ends["a"].num_cached_tokens == 8
        assert sum(r.num_prefill_tokens for r in outcome.reports) == 6

    def test_nothing_came(self) -> None:
        engine, runner = make_engine()
        drive_all(engine, make_spec("warm", PROMPT, max_tokens=1))
        prompt = [*PROMPT, 2, 6, 5, 3]
        engine.add(make_spec("a", prompt, prefix_blocks=2))
        assert engine.step().reserved == [Reserved("a", 4, [1, 2], CachedTokens(4))]
        runner.scribble([1, 2])
        engine.continue_prefill("a", 1)
        outcome = drive(engine)
        assert outcome.token_ids["a"] == continuation(prompt, 5)
        assert outcome.ends["a"].num_cached_tokens == 4

    def test_with_all_of_it_cached_nothing_is_awaited(self) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", self.LONG))
        outcome = drive_all(engine, make_spec("a", self.LONG, prefix_blocks=3))
        assert outcome.token_ids["a"] == continuation(self.LONG, 5)
        assert not any(report.reserved for report in outcome.reports)

    def test_of_a_whole_prompt_the_last_token_is_computed_here(self) -> None:
        engine, runner = make_engine()
        prompt = self.LONG[:8]
        engine.add(make_spec("a", prompt, mode=Mode.PREFILL_ONLY, prefix_blocks=2))
        assert engine.step().reserved == [Reserved("a", 0, [0, 1])]
        runner.fill([0, 1], prompt, 0)
        engine.continue_prefill("a", 2)
        outcome = drive(engine)
        assert sum(r.num_prefill_tokens for r in outcome.reports) == 4
        assert outcome.reports[-1].prefilled == [
            Prefilled("a", continuation(prompt, 1)[0], CachedTokens(peer=4))
        ]

    def test_for_a_peer_cached_blocks_are_lent_at_admission_and_what_came_when_it_is_good(
        self,
    ) -> None:
        engine, runner = make_engine()
        drive_all(engine, make_spec("warm", self.LONG[:5], max_tokens=1))
        engine.add(make_spec("a", self.LONG, mode=Mode.PREFILL_ONLY, prefix_blocks=3))
        report = engine.step()
        assert report.reserved == [Reserved("a", 4, [1, 2, 3], CachedTokens(4))]
        assert report.final_blocks == [FinalBlocks("a", 0, [0])]
        assert (report.load.num_pulls, report.load.num_leases) == (1, 0)
        runner.fill([0, 1, 2], self.LONG[:12], 1)
        engine.continue_prefill("a", 3)
        outcome = drive(engine)
        reports = [r.final_blocks for r in outcome.reports]
        assert [final for runs in reports for final in runs] == [
            FinalBlocks("a", 1, [1, 2]),
            FinalBlocks("a", 3, [3]),
        ]
        assert engine.load().num_leases == 1
        engine.remove("a")
        assert engine.load().blocks_used == 0

    def test_a_twin_takes_the_place_of_what_came(self) -> None:
        engine, runner = make_engine()
        engine._scheduler.early_reuse.wait_max_s = 0.0
        engine.add(make_spec("a", self.LONG, mode=Mode.PREFILL_ONLY, prefix_blocks=2))
        engine.step()
        drive_all(engine, make_spec("b", self.LONG[:9], max_tokens=1))
        runner.fill(engine.block_ids("a"), self.LONG[:8], 0)
        engine.continue_prefill("a", 2)
        assert engine.block_ids("a") == [4, 5, 2, 3]
        outcome = drive(engine)
        assert outcome.reports[0].final_blocks == [FinalBlocks("a", 0, [4, 5])]

    def test_others_take_the_place_of_what_may_still_be_written(self) -> None:
        engine, runner = make_engine(num_blocks=6)
        engine.add(make_spec("a", self.LONG, mode=Mode.PREFILL_ONLY, prefix_blocks=3))
        engine.step()
        runner.fill([0], self.LONG[:4], 0)
        engine.continue_prefill("a", 1, unsafe_blocks=[1, 2])
        assert sorted(engine.block_ids("a")) == [0, 3, 4, 5]
        assert engine.load().blocks_quarantined == 2
        runner.scribble([1, 2])
        assert drive(engine).reports[-1].prefilled[0].first_token_id == self.first()
        engine.unquarantine([1, 2])
        engine.remove("a")
        engine.check_integrity()

    def test_without_others_it_ends_with_its_blocks_fenced(self) -> None:
        engine, _ = make_engine(num_blocks=5)
        engine.add(make_spec("a", self.LONG, mode=Mode.PREFILL_ONLY, prefix_blocks=3))
        engine.step()
        with pytest.raises(QueueFull):
            engine.continue_prefill("a", 1, unsafe_blocks=[1, 2])
        engine.check_integrity()
        load = engine.load()
        assert (load.blocks_used, load.blocks_quarantined, load.num_pulls) == (0, 2, 0)

    @pytest.mark.parametrize(("num_blocks", "unsafe"), [(0, []), (5, []), (3, [2])])
    def test_what_cannot_be_good_ends_it_with_its_blocks_fenced(
        self, num_blocks: int, unsafe: list[int]
    ) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", self.LONG[:5], max_tokens=1))
        engine.add(make_spec("a", self.LONG, prefix_blocks=3))
        engine.step()
        with pytest.raises(InternalError):
            engine.continue_prefill("a", num_blocks, unsafe)
        engine.check_integrity()
        assert engine.load().blocks_quarantined == len(unsafe)
        assert engine.load().num_pulls == 0

    def test_each_way_on_is_for_its_own_mode(self) -> None:
        engine, _ = make_engine()
        engine._scheduler.early_reuse.wait_max_s = 0.0
        engine.add(make_spec("prefix", self.LONG, prefix_blocks=3))
        engine.add(make_spec("all", self.LONG, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.step()
        with pytest.raises(InternalError, match="waits for the KV of a prefix"):
            engine.commit("prefix", 1)
        with pytest.raises(InternalError, match="waits for the KV of a prefix"):
            engine.start_local_prefill("prefix")
        with pytest.raises(InternalError, match="waits for the KV of the whole prompt"):
            engine.continue_prefill("all", 3)
        engine.continue_prefill("prefix", 0)
        with pytest.raises(InternalError, match="is running; it must be"):
            engine.continue_prefill("prefix", 0)

    def test_preempted_it_awaits_nothing_any_more(self) -> None:
        engine, runner = make_engine(num_blocks=6)
        old, young = [9, 8, 7, 6, 5, 4, 3], [1, 2, 3, 4, 5, 6, 7]
        engine.add(make_spec("old", old, max_tokens=14))
        engine.add(make_spec("a", young, max_tokens=14, prefix_blocks=1))
        first = engine.step()
        runner.fill(first.reserved[0].block_ids, young[:4], 0)
        engine.continue_prefill("a", 1)
        outcome = drive(engine)
        assert outcome.ends["a"].num_preemptions >= 1
        assert outcome.token_ids["a"] == continuation(young, 14)
        assert not any(report.reserved for report in outcome.reports)

    def first(self) -> int:
        return continuation(self.LONG, 1)[0]
