"""A first token that would come too late is refused before anything of its sequence is computed."""

from __future__ import annotations

import pytest

from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.engine.types import Mode
from tandem.errors import Overloaded
from tests.engine_driver import make_engine, make_spec

RATES = WorkerRates(PrefillRate(0.0, 1.0 / 40, 0.0), step_tokens=40, measured=True)
LIMIT_S = 10.5


def prompt(number: int) -> list[int]:
    """A prompt that takes 1 s; none begins like another."""
    return [number, *range(100, 139)]


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL_ONLY])
@pytest.mark.parametrize("times", [0.92, 0.97, 1.0, 1.04])
def test_a_burst_of_two_routers_meets_its_limit(mode: Mode, times: float) -> None:
    """Each router takes as many as meet the limit, without knowledge of the other. Prompts take
    `times` as long as predicted."""
    engine, _ = make_engine(num_blocks=400, max_tokens_per_step=40, max_num_seqs=39)
    now = 0.0
    deadlines = engine._scheduler.deadlines
    deadlines.clock, deadlines._rates = (lambda: now), (lambda: RATES)
    taken, refused = set(), set()
    for number in range(64):
        spec = make_spec(
            f"{number}", prompt(number), mode=mode, max_tokens=1, first_token_by=LIMIT_S
        )
        try:
            engine.add(spec)
            taken.add(spec.sequence_id)
        except Overloaded:
            refused.add(spec.sequence_id)
    assert 10 <= len(taken) <= 13  # a queue may take 1.25 times less than predicted
    first_tokens: dict[str, float] = {}
    while engine.has_work():
        report = engine.step()
        for failed in report.failed:
            assert failed.code == "overloaded"
            refused.add(failed.sequence_id)
        now += times * report.num_prefill_tokens / 40
        news = [*report.new_tokens, *report.prefilled]
        first_tokens |= {new.sequence_id: now for new in news}
        for new in report.prefilled:
            engine.remove(new.sequence_id)
    engine.check_integrity()
    assert not refused & set(first_tokens)
    assert len(refused) + len(first_tokens) == 64
    largest = int(LIMIT_S / times)  # burst that meets the limit
    assert max(first_tokens.values()) <= LIMIT_S
    assert len(first_tokens) >= 0.9 * largest


def test_an_idle_engine_refuses_nothing() -> None:
    """Nothing would come sooner without it."""
    engine, _ = make_engine(num_blocks=400)
    deadlines = engine._scheduler.deadlines
    deadlines.clock, deadlines._rates = (lambda: 5.0), (lambda: RATES)
    engine.add(make_spec("a", prompt(1), max_tokens=1, first_token_by=5.001))
    assert [new.sequence_id for new in engine.step().new_tokens] == ["a"]


def test_what_a_peer_computed_in_time_is_not_refused_later() -> None:
    """The client has its first token, so the deadline says nothing about the rest."""
    engine, _ = make_engine(num_blocks=400, max_num_seqs=1)
    now = 0.0
    deadlines = engine._scheduler.deadlines
    deadlines.clock, deadlines._rates = (lambda: now), (lambda: RATES)
    mode = Mode.WAITING_FOR_REMOTE_KV
    engine.add(make_spec("first", prompt(0), max_tokens=1))
    engine.add(make_spec("a", prompt(1), mode=mode, max_tokens=3, first_token_by=5.0))
    engine.step()  # "a" waits for a running slot
    engine.step()
    now = 6.0
    engine.commit("a", 7)
    report = engine.step()
    assert not report.failed
    assert [new.sequence_id for new in report.new_tokens] == ["a"]


def test_what_was_to_be_computed_here_is_not_refused_later() -> None:
    """The router then knows that the request is admitted."""
    engine, _ = make_engine(num_blocks=400, max_num_seqs=1)
    now = 0.0
    deadlines = engine._scheduler.deadlines
    deadlines.clock, deadlines._rates = (lambda: now), (lambda: RATES)
    mode = Mode.WAITING_FOR_REMOTE_KV
    engine.add(make_spec("first", prompt(0), max_tokens=1))
    engine.add(make_spec("a", prompt(1), mode=mode, max_tokens=1, first_token_by=5.0))
    engine.step()  # "a" waits for a running slot
    engine.step()
    engine.start_local_prefill("a")
    now = 6.0
    report = engine.step()
    assert not report.failed
    assert [new.sequence_id for new in report.new_tokens] == ["a"]


def test_a_queue_is_priced_with_what_precedes_its_tokens() -> None:
    engine, _ = make_engine(num_blocks=400, max_tokens_per_step=40)
    rates = WorkerRates(PrefillRate(0.5, 1e-3, 1e-4), step_tokens=40, measured=True)
    deadlines = engine._scheduler.deadlines
    deadlines._rates, deadlines._has_rates = (lambda: rates), (lambda: True)
    assert engine.load().queued_s == 0.0
    for number in range(3):
        engine.add(make_spec(f"{number}", prompt(number), max_tokens=1))
    alone_s = rates.prefill.seconds(40, 0, 40)
    assert engine.load().queued_s == pytest.approx(3 * alone_s)
    whole_s = rates.prefill.seconds(120, 0, 40)
    assert whole_s > 3 * alone_s + 0.1  # of one long prompt


def test_only_waiting_sequences_are_handed_back_oldest_first() -> None:
    engine, _ = make_engine(num_blocks=400, max_num_seqs=2)
    for number in range(6):
        engine.add(make_spec(f"{number}", prompt(number), max_tokens=9))
    engine.step()
    engine.return_waiting(["0", "1", "3", "4", "5"], 2)
    report = engine.step()
    assert [(f.sequence_id, f.code) for f in report.failed] == [
        ("3", "returned"),
        ("4", "returned"),
    ]
    load = engine.load()
    assert (load.num_running, load.num_waiting) == (2, 2)
    engine.check_integrity()


def test_a_sequence_that_is_handed_back_is_reported_by_an_idle_engine() -> None:
    engine, _ = make_engine(num_blocks=400, max_num_seqs=1)
    for name in ("a", "b"):
        engine.add(make_spec(name, prompt(ord(name)), max_tokens=9))
    engine.step()
    engine.return_waiting(["b"], 1)
    engine.remove("a")
    assert engine.has_work()  # else nobody would hear of its end
    assert [(f.sequence_id, f.code) for f in engine.step().failed] == [("b", "returned")]
    assert not engine.has_work()


def test_a_new_sequence_is_not_handed_back_before_it_could_start() -> None:
    engine, _ = make_engine(num_blocks=400)
    engine.add(make_spec("a", prompt(1), max_tokens=9))
    engine.return_waiting(["a"], 1)
    report = engine.step()
    assert not report.failed
    assert [a.sequence_id for a in report.admitted] == ["a"]


def test_a_sequence_that_waits_for_blocks_of_another_is_not_handed_back() -> None:
    """It would compute them again elsewhere."""
    engine, _ = make_engine(num_blocks=400, max_tokens_per_step=8)
    for name in ("a", "b"):
        engine.add(make_spec(name, prompt(7), max_tokens=9))
    engine.step()
    engine.return_waiting(["a", "b"], 2)
    assert not engine.step().failed
