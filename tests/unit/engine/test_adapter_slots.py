"""The adapters in an engine's memory: who gets a slot, who waits for one, and whose is taken."""

from __future__ import annotations

import time

import pytest

from tandem.common.adapter import Adapter
from tandem.engine.adapter_slots import FAILED_S, AdapterSlots, AdapterSlotState
from tandem.engine.engine import Engine
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import AdapterUnavailable
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.toy_runner import ToyRunner, continuation

ADAPTERS = {name: Adapter(name, f"digest-{name}", "/somewhere", 4) for name in "abc"}
MISSING = Adapter("missing", "digest-missing", "", 4)
PROMPT = list(range(9))
WAIT_S = 600.0


def spec(name: str, adapter: str = "", **fields: object) -> SequenceSpec:
    chosen = {**ADAPTERS, "missing": MISSING}.get(adapter)
    return make_spec(name, PROMPT, adapter=chosen, **fields)  # type: ignore[arg-type]


def drive(engine: Engine, outcome: Outcome | None = None, *, until: str = "") -> Outcome:
    """Steps until nothing is to be done or read, or until this sequence has a token."""
    outcome, give_up_at = outcome or Outcome(), time.monotonic() + WAIT_S
    while engine.has_work() or engine.awaits_threads():
        assert time.monotonic() < give_up_at
        if engine.has_work():
            outcome.take(engine.step())
            engine.check_integrity()
        if until and until in outcome.token_ids:
            break
    return outcome


def run(*specs: SequenceSpec, **settings: int) -> tuple[Outcome, ToyRunner]:
    engine, runner = make_engine(num_blocks=64, **settings)
    for each in specs:
        engine.add(each)
    return drive(engine), runner


def test_adapters_and_the_base_run_together() -> None:
    outcome, runner = run(spec("1", "a"), spec("2"), spec("3", "b"), spec("4", "a"))
    assert outcome.token_ids == {name: continuation(PROMPT, 5) for name in "1234"}
    assert runner.adapters == {"digest-a", "digest-b"}


def test_each_adapter_has_blocks_of_its_own() -> None:
    """The toy model computes the same for all: what is reused is told by the counts."""
    engine, _ = make_engine(num_blocks=64)
    cached = {}
    for name, adapter in (("1", "a"), ("2", ""), ("3", "b"), ("4", "a"), ("5", "")):
        engine.add(spec(name, adapter))
        cached[name] = drive(engine).ends[name].num_cached_tokens
    assert cached == {"1": 0, "2": 0, "3": 0, "4": 8, "5": 8}


def test_changed_files_under_one_name_find_no_block_of_the_old_ones() -> None:
    engine, _ = make_engine(num_blocks=64)
    old, new = (Adapter("a", digest, "/somewhere", 4) for digest in ("old", "new"))
    for adapter, expected in ((old, 0), (old, 8), (new, 0), (new, 8), (old, 8)):
        engine.add(make_spec("1", PROMPT, adapter=adapter))
        assert drive(engine).ends["1"].num_cached_tokens == expected


def test_stored_blocks_name_their_adapter_where_they_have_token_ids() -> None:
    for has_tokens in (True, False):
        outcome, _ = run(spec("1", "a"), spec("2"), report_block_tokens=has_tokens)
        stored = [block for report in outcome.reports for block in report.stored]
        of_each = [block.adapter for block in stored]
        assert of_each.count(ADAPTERS["a"]) == has_tokens * of_each.count(None)
        assert len(stored) == 6


def test_the_slot_that_is_idle_the_longest_is_taken() -> None:
    engine, runner = make_engine(num_blocks=64, max_loras=2)
    for name, adapter in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "c")):
        engine.add(spec(name, adapter))
        drive(engine)
    assert runner.adapters == {"digest-a", "digest-c"}
    assert engine.stats().adapters.loaded == ["digest-a", "digest-c"]


def test_a_sequence_waits_for_a_slot_and_its_younger_ones_with_it() -> None:
    engine, _ = make_engine(num_blocks=64, max_loras=1)
    engine.add(spec("running", "a", max_tokens=20))
    outcome = drive(engine, until="running")
    for name, adapter in (("waits", "b"), ("younger", "a"), ("base", "")):
        engine.add(spec(name, adapter))
    drive(engine, outcome, until="base")
    assert outcome.token_ids.keys() == {"running", "base"}
    adapters = engine.stats().adapters
    assert (adapters.running, adapters.waiting) == (["a"], ["a", "b"])
    drive(engine, outcome)
    assert list(outcome.ends) == ["base", "running", "waits", "younger"]


def test_a_prefill_for_a_peer_needs_its_slot_until_it_is_computed() -> None:
    engine, _ = make_engine(num_blocks=64, max_loras=1)
    engine.add(spec("held", "a", mode=Mode.PREFILL_ONLY))
    drive(engine)
    engine.add(spec("2", "b"))
    assert drive(engine).token_ids == {"2": continuation(PROMPT, 5)}


def test_one_that_cannot_be_read_ends_its_sequences_and_is_refused_for_a_while() -> None:
    engine, _ = make_engine(num_blocks=64)
    engine.add(spec("1", "missing"))
    engine.add(spec("2", "missing"))
    engine.add(spec("3"))
    outcome = drive(engine)
    failed = [each for report in outcome.reports for each in report.failed]
    assert [(each.sequence_id, each.code) for each in failed] == [
        ("1", AdapterUnavailable.code),
        ("2", AdapterUnavailable.code),
    ]
    assert "'missing' cannot be loaded: it has no folder" in failed[0].message
    assert list(outcome.ends) == ["3"]
    with pytest.raises(AdapterUnavailable, match="no folder"):
        engine.add(spec("4", "missing"))
    assert engine.stats().adapters.failed == [MISSING.digest]


def test_it_is_tried_again_later() -> None:
    now = 0.0
    slots = AdapterSlots(ToyRunner(block_size=4), num_slots=1, rank_max=8, clock=lambda: now)
    assert slots.request(MISSING, set) is AdapterSlotState.LOADING
    give_up_at = time.monotonic() + WAIT_S
    while not slots.has_results:
        assert time.monotonic() < give_up_at
    assert set(slots.settle()) == {MISSING.digest}
    with pytest.raises(AdapterUnavailable):
        slots.check(MISSING)
    now = FAILED_S
    slots.check(MISSING)
    assert slots.failed == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 0}, "max-loras is 0"),
        ({"max_lora_rank": 3}, r"at most 3 \(--max-lora-rank\)"),
    ],
)
def test_an_engine_refuses_what_it_has_no_room_for(settings: dict[str, int], message: str) -> None:
    engine, _ = make_engine(**settings)
    with pytest.raises(AdapterUnavailable, match=message):
        engine.add(spec("1", "a"))
