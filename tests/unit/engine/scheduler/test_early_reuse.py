"""A sequence waits for blocks that another computes or pulls; it takes over if that one ends."""

from __future__ import annotations

import pytest

from tandem.engine.engine import Engine
from tandem.engine.types import Mode
from tests.engine_driver import Outcome, drive, drive_all, make_engine, make_spec
from tests.grouped_toy import STATE, GroupedToyRunner, make_grouped_engine
from tests.grouped_toy import continuation as continuation_of_groups
from tests.toy_runner import continuation

PROMPT = [(7 * i + i // 5) % 11 for i in range(42)]


def num_prefill(outcome: Outcome) -> int:
    return sum(report.num_prefill_tokens for report in outcome.reports)


def waiting(engine: Engine) -> list[str]:
    return [sequence.sequence_id for sequence in engine._scheduler.waiting]


@pytest.mark.parametrize("budget", [5, 64, 512])
@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL_ONLY])
def test_fifty_equal_prompts_are_computed_once(budget: int, mode: Mode) -> None:
    engine, _ = make_engine(num_blocks=400, max_tokens_per_step=budget)
    specs = [make_spec(str(i), PROMPT, mode=mode, max_tokens=3) for i in range(50)]
    outcome = drive_all(engine, *specs)
    expected = continuation(PROMPT, 3)
    if mode is Mode.LOCAL:
        assert all(outcome.token_ids[str(i)] == expected for i in range(50))
        computed = num_prefill(outcome)
        # The first one's tokens, and the last one of each other if the first still ran, or
        # the two after the last full block.
        assert len(PROMPT) + 49 <= computed <= len(PROMPT) + 49 * 2
    else:
        prefilled = [p for report in outcome.reports for p in report.prefilled]
        assert [p.first_token_id for p in prefilled] == expected[:1] * 50
        assert num_prefill(outcome) <= len(PROMPT) + 49 * 2
        for i in range(50):
            engine.remove(str(i))
    engine.check_integrity()
    assert engine.load().blocks_used == 0


def test_a_longer_prompt_waits_for_what_both_begin_with_only() -> None:
    engine, _ = make_engine(num_blocks=100, max_tokens_per_step=8)
    engine.add(make_spec("a", PROMPT))
    engine.add(make_spec("b", [*PROMPT[:18], 99, 98, 97]))
    outcome = Outcome()
    outcome.take(engine.step())
    assert waiting(engine) == ["b"]
    drive(engine, outcome)
    assert outcome.token_ids["b"] == continuation([*PROMPT[:18], 99, 98, 97], 5)
    assert outcome.ends["b"].num_cached_tokens == 18
    assert num_prefill(outcome) == len(PROMPT) + 3


def test_others_go_first_meanwhile() -> None:
    engine, _ = make_engine(num_blocks=100, max_tokens_per_step=60)
    engine.add(make_spec("a", PROMPT))
    engine.add(make_spec("b", PROMPT))
    engine.add(make_spec("c", [99, 98, 97]))
    report = engine.step()
    assert [each.sequence_id for each in report.admitted] == ["a", "c"]


def test_only_lines_wait_for_a_line_of_a_batch() -> None:
    engine, _ = make_engine(num_blocks=100, max_tokens_per_step=8)
    engine.add(make_spec("line", PROMPT, is_batch=True))
    engine.step()
    engine.add(make_spec("next line", PROMPT, is_batch=True))
    engine.add(make_spec("a", PROMPT))
    report = engine.step()
    assert [each.sequence_id for each in report.admitted] == ["a"]
    assert waiting(engine) == ["next line"]


def test_it_takes_over_from_one_that_is_cancelled() -> None:
    engine, _ = make_engine(num_blocks=100, max_tokens_per_step=8)
    for name in "abc":
        engine.add(make_spec(name, PROMPT))
    outcome = Outcome()
    outcome.take(engine.step())
    outcome.take(engine.step())
    assert waiting(engine) == ["b", "c"]
    engine.remove("a")
    outcome.take(engine.step())
    assert waiting(engine) == ["c"]  # which waits for "b" now
    drive(engine, outcome)
    for name in "bc":
        assert outcome.token_ids[name] == continuation(PROMPT, 5)
    assert outcome.ends["b"].num_cached_tokens == 16
    assert num_prefill(outcome) <= len(PROMPT) + 2


def test_it_takes_over_from_one_that_is_preempted() -> None:
    engine, _ = make_engine(num_blocks=14, max_tokens_per_step=8)
    engine.add(make_spec("old", [50], max_tokens=30))
    outcome = Outcome()
    outcome.take(engine.step())
    for name in "ab":
        engine.add(make_spec(name, PROMPT, max_tokens=4))
    while not any(s.sequence_id == "a" for s in engine._scheduler.running):
        outcome.take(engine.step())
    running = next(s for s in engine._scheduler.running if s.sequence_id == "a")
    assert waiting(engine) == ["b"]
    engine._scheduler._preempt(running)
    engine.check_integrity()
    drive(engine, outcome)
    for name in "ab":
        assert outcome.token_ids[name] == continuation(PROMPT, 4)


def test_it_computes_after_the_bound() -> None:
    engine, _ = make_engine(num_blocks=100, shared_wait_s=3.0)
    engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
    engine.add(make_spec("b", PROMPT))
    now = [100.0]
    engine._scheduler.early_reuse.clock = lambda: now[0]
    outcome = Outcome()
    outcome.take(engine.step())
    assert waiting(engine) == ["b"]
    now[0] += 2.9
    outcome.take(engine.step())
    assert waiting(engine) == ["b"]
    assert not engine.has_work()
    now[0] += 0.1
    assert engine.has_work()
    drive(engine, outcome)
    assert outcome.token_ids["b"] == continuation(PROMPT, 5)
    (admitted,) = [a for r in outcome.reports for a in r.admitted if a.sequence_id == "b"]
    assert admitted.shared_wait_s == pytest.approx(3.0)


def test_nobody_waits_without_a_bound() -> None:
    engine, _ = make_engine(num_blocks=100, shared_wait_s=0.0)
    for name in "ab":
        engine.add(make_spec(name, PROMPT))
    outcome = Outcome()
    outcome.take(engine.step())
    assert waiting(engine) == []
    drive(engine, outcome)
    assert outcome.token_ids["a"] == outcome.token_ids["b"] == continuation(PROMPT, 5)


@pytest.mark.parametrize("comes", [True, False])
def test_kv_that_a_peer_sends_is_waited_for(comes: bool) -> None:
    engine, runner = make_engine(num_blocks=100)
    first = continuation(PROMPT, 1)[0]
    for name in "ab":
        engine.add(make_spec(name, PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV, max_tokens=5))
    outcome = Outcome()
    outcome.take(engine.step())
    assert [each.sequence_id for each in outcome.reports[-1].reserved] == ["a"]
    if comes:
        runner.fill(engine.block_ids("a"), PROMPT, 0)
        engine.commit("a", first)
    else:
        engine.start_local_prefill("a")
    outcome.take(engine.step())
    drive(engine, outcome)
    expected = continuation(PROMPT, 5)
    assert outcome.token_ids["a"] == expected[1 if comes else 0 :]
    assert outcome.reports[-1].load.num_waiting == 0
    # With a minimum of 0 tokens the second one asks a peer for its last ones, else it has all.
    assert "b" in outcome.token_ids or "b" in {
        each.sequence_id for r in outcome.reports for each in r.reserved
    }


def test_a_short_common_beginning_of_what_a_peer_sends_is_not_waited_for() -> None:
    engine, _ = make_engine(num_blocks=100)
    engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
    engine.step()
    prompt = [*PROMPT[:17], 99]
    assert drive_all(engine, make_spec("b", prompt)).token_ids["b"] == continuation(prompt, 5)


def test_a_prompt_for_a_peer_waits_for_no_peer() -> None:
    """Two workers that prefill for each other would wait in a circle."""
    engine, _ = make_engine(num_blocks=100)
    engine.add(make_spec("a", PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
    engine.step()
    outcome = drive_all(engine, make_spec("b", PROMPT, mode=Mode.PREFILL_ONLY))
    (prefilled,) = [p for report in outcome.reports for p in report.prefilled]
    assert prefilled.first_token_id == continuation(PROMPT, 1)[0]


def test_another_salt_waits_for_nobody() -> None:
    engine, _ = make_engine(num_blocks=100, max_tokens_per_step=60)
    engine.add(make_spec("a", PROMPT))
    engine.add(make_spec("b", PROMPT, cache_salt=b"salt"))
    assert [each.sequence_id for each in engine.step().admitted] == ["a", "b"]


class TestStates:
    """A sequence can resume only where the states of another are frozen: in the toy, after blocks 2
    and 4 of a prompt of 20 tokens, which has 5 blocks."""

    PROMPT = list(range(20))

    def make(self, *, tokens_per_step: int = 4) -> tuple[Engine, GroupedToyRunner]:
        return make_grouped_engine(
            (None, STATE), num_blocks=100, max_tokens_per_step=tokens_per_step
        )

    def test_it_waits_for_a_frozen_state(self) -> None:
        engine, _ = self.make()
        engine.add(make_spec("a", self.PROMPT))
        engine.add(make_spec("b", self.PROMPT))
        outcome = Outcome()
        outcome.take(engine.step())
        assert waiting(engine) == ["b"]
        drive(engine, outcome)
        assert outcome.token_ids["a"] == outcome.token_ids["b"]
        assert outcome.ends["b"].num_cached_tokens == 16

    def test_it_does_not_wait_for_blocks_without_a_state(self) -> None:
        """The first state is frozen after token 8; both begin with 7 tokens."""
        engine, _ = self.make()
        engine.add(make_spec("a", self.PROMPT))
        engine.add(make_spec("b", [*self.PROMPT[:7], 99, 98]))
        report = engine.step()
        assert [each.sequence_id for each in report.admitted] == ["a"]
        assert waiting(engine) == ["b"]  # the tokens of the step are used up
        assert not engine._scheduler.waiting[0].shared_since

    @pytest.mark.parametrize("num_common", [16, 15])
    def test_it_waits_for_the_states_that_a_peer_sends_with_a_prompt(self, num_common: int) -> None:
        engine, _ = self.make(tokens_per_step=100)
        engine.add(make_spec("a", self.PROMPT, mode=Mode.WAITING_FOR_REMOTE_KV))
        engine.add(make_spec("b", [*self.PROMPT[:num_common], *[99] * (20 - num_common)]))
        engine.add(make_spec("c", [7]))
        outcome = drive(engine)
        assert waiting(engine) == (["b"] if num_common == 16 else [])
        assert outcome.token_ids["c"] == continuation_of_groups([7], 5, (None, STATE))

    @pytest.mark.parametrize("num_common", [16, 15])
    def test_it_waits_for_a_prefix_that_a_peer_sends_with_a_state(self, num_common: int) -> None:
        engine, _ = self.make(tokens_per_step=100)
        engine.add(make_spec("a", self.PROMPT, prefix_blocks=4))
        engine.add(make_spec("b", [*self.PROMPT[:num_common], *[99] * (20 - num_common)]))
        drive(engine)
        assert waiting(engine) == (["b"] if num_common == 16 else [])
