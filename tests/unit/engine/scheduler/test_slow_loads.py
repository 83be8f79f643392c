"""A load that has become slower than computing is given up, also if it never stands still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.soonest import LoadChoice, Prompt, TierReach
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.engine.engine import Engine
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.tier import LoadRate
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.toy_runner import continuation

WAIT_S = 600.0
PROMPT = [7] * 25  # six blocks, and a token
READ_S = 0.2
PATIENCE_S = 0.3


@pytest.fixture
def reads_s() -> list[Iterator[float]]:
    """One iterator: how long each read of the tier takes."""
    return [repeat(READ_S)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, reads_s: list[Iterator[float]]) -> Engine:
    """An engine whose tier has the blocks of `PROMPT`, which the pool has not. Each takes `READ_S`
    to read, of which no rate tells."""
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr("tandem.engine.scheduler.loads._PATIENCE_S", PATIENCE_S)
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15)
    for number in range(6):
        answer(engine, str(number), [7 + number] * 25)
    engine._tiers.tiers[0].rate.block_s = 1e-6
    read = HostStorage.read

    def slow(*about: Any) -> None:
        time.sleep(next(reads_s[0]))
        read(*about)

    monkeypatch.setattr(HostStorage, "read", slow)
    return engine


def answer(engine: Engine, name: str, *prompts: list[int]) -> Outcome:
    """Answers prompts at the same time."""
    outcome, give_up_at = Outcome(), time.monotonic() + WAIT_S
    names = [name + "+" * number for number in range(len(prompts))]
    for each, prompt in zip(names, prompts, strict=True):
        engine.add(make_spec(each, prompt))
    while engine.has_work() or engine.awaits_threads():
        assert time.monotonic() < give_up_at
        if engine.has_work():
            outcome.take(engine.step())
            engine.check_integrity()
    assert outcome.ends.keys() == set(names)
    return outcome


def choose_load(prompt: Prompt, tiers: list[TierReach], **_: object) -> LoadChoice:
    """Loads all blocks, as where computing would delay others."""
    return LoadChoice(prompt.num_held, tiers[-1].num_blocks, False, 0.0, 0.0, 0.0)


def set_compute_s(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets the engine expect so many seconds to compute the prompt."""
    rate = PrefillRate(0.0, seconds / len(PROMPT), 0.0)
    monkeypatch.setattr(StepTimeModel, "prefill_rate", rate)


def test_a_late_beginning_is_no_slow_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, reads_s: list[Iterator[float]]
) -> None:
    """The first part takes as long as a disk or a store may need to answer."""
    set_compute_s(monkeypatch, READ_S / 100)
    monkeypatch.setattr("tandem.engine.scheduler.loads.choose_soonest", choose_load)
    reads_s[0] = chain([READ_S], repeat(0.0))
    outcome = answer(engine, "late", PROMPT)
    assert outcome.ends["late"].cached == CachedTokens(host=24)
    engine.close()


def test_it_is_computed_if_that_is_sooner(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    set_compute_s(monkeypatch, READ_S)
    outcome = answer(engine, "slow", PROMPT, PROMPT)  # the second one waits for the load, too
    for end in outcome.ends.values():
        assert end.cached.host == 0
    assert outcome.token_ids["slow"] == outcome.token_ids["slow+"] == continuation(PROMPT, 5)
    engine.close()


@pytest.mark.parametrize(("compute_s", "block_s"), [(60.0, 1e-6), (READ_S, READ_S)])
def test_it_goes_on(
    compute_s: float, block_s: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing takes longer, or the load is as slow as it was expected to be."""
    engine._tiers.tiers[0].rate.block_s = block_s
    set_compute_s(monkeypatch, compute_s)
    monkeypatch.setattr("tandem.engine.scheduler.loads.choose_soonest", choose_load)
    outcome = answer(engine, "slow", PROMPT)
    assert outcome.ends["slow"].cached == CachedTokens(host=24)
    assert outcome.token_ids["slow"] == continuation(PROMPT, 5)
    engine.close()
