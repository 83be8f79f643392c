"""A tier's copy is loaded where that is sooner than computing, by the rates of both.

Time passes only when a block is read, and a prompt's token takes 10 ms to compute.
"""

from __future__ import annotations

import threading
import time

import pytest

from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.engine.engine import Engine
from tandem.engine.tiers.storage import Bytes
from tandem.engine.tiers.tier import LoadRate
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.toy_runner import continuation

TOKEN_S = 0.01
WAIT_S = 600.0
PROMPTS = [[number] * 25 for number in range(6)]  # 6 blocks of 4 tokens, and one token


class Bench:
    """An engine with a host tier that reads a block in `block_s`, while `gate` is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block_s: float) -> None:
        rate = PrefillRate(step_s=0.0, token_s=TOKEN_S, token_context_s=0.0)
        monkeypatch.setattr(StepTimeModel, "prefill_rate", rate)
        self.engine: Engine = make_engine(num_blocks=24, kv_host_bytes=1 << 15)[0]
        self.outcome = Outcome()
        self.gate = threading.Event()
        self.gate.set()
        self._now = 0.0
        self.engine._tiers.clock = lambda: self._now
        storage = self.engine._tiers.tiers[0].storage
        read = storage.read

        def timed_read(slot: int, block_hash: bytes, target: Bytes) -> None:
            assert self.gate.wait(WAIT_S)
            read(slot, block_hash, target)
            self._now += block_s

        monkeypatch.setattr(storage, "read", timed_read)
        for number in range(len(PROMPTS)):
            self.ask(f"first {number}", number)

    def ask(self, name: str, number: int) -> int:
        """Returns how many tokens of a prompt came from the tier."""
        self.engine.add(make_spec(name, PROMPTS[number]))
        return self.settle(name, number)

    def settle(self, name: str, number: int) -> int:
        deadline = time.monotonic() + WAIT_S
        while self.engine.has_work() or self.engine.awaits_threads():
            assert time.monotonic() < deadline
            if self.engine.has_work():
                self.outcome.take(self.engine.step())
        assert self.outcome.token_ids[name] == continuation(PROMPTS[number], 5)
        return self.outcome.ends[name].cached.host


@pytest.mark.parametrize(("block_s", "num_loaded"), [(0.002, 24), (0.5, 0)])
def test_the_sooner_of_load_and_compute(
    block_s: float, num_loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block takes 40 ms to compute, and six of them 240 ms."""
    bench = Bench(monkeypatch, block_s)
    assert bench.ask("not measured", 0) == 24
    assert bench.ask("measured", 1) == num_loaded
    bench.engine.close()


def test_a_prompt_is_computed_from_its_front_while_its_end_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block is computed in 40 to 60 ms, in which the tier gives up to three; then one more is."""
    bench = Bench(monkeypatch, 0.02)
    bench.ask("not measured", 0)
    bench.gate.clear()
    bench.engine.add(make_spec("both", PROMPTS[1]))
    report = bench.engine.step()
    bench.outcome.take(report)
    assert report.num_prefill_tokens == 4
    assert bench.engine.load().num_pulls == 1
    bench.gate.set()
    assert 8 <= bench.settle("both", 1) <= 20
    bench.engine.close()


def test_blocks_are_computed_that_a_slow_load_has_not_come_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tier was fast when it was measured, and stands at one block now: most others are
    computed, chunk by chunk, until it looks sooner to wait for it."""
    bench = Bench(monkeypatch, 0.03)
    bench.ask("not measured", 0)
    bench.gate.clear()
    bench.engine.add(make_spec("both", PROMPTS[1]))
    for _ in range(6):
        if bench.engine.has_work():
            bench.outcome.take(bench.engine.step())
    assert not bench.engine.has_work()
    assert bench.engine.awaits_threads()
    bench.gate.set()
    assert 4 <= bench.settle("both", 1) <= 16
    bench.engine.close()


def test_a_load_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt's load of 6 ms is queued. The second has two blocks less to compute than its
    own load alone would leave it."""
    bench = Bench(monkeypatch, 0.001)
    bench.ask("not measured", 0)
    bench.gate.clear()
    bench.engine.add(make_spec("loads", PROMPTS[1]))
    bench.outcome.take(bench.engine.step())
    assert bench.engine._tiers.queued_s == pytest.approx(0.006)
    assert bench.engine.load().num_pulls == 1
    bench.gate.set()
    assert bench.settle("loads", 1) == 24
    assert bench.engine._tiers.queued_s == 0.0
    bench.engine.close()


def test_a_slow_tier_is_tried_again() -> None:
    rate = LoadRate()
    rate.observe(6, 6 * 0.05)
    num_declined = 0
    while 6 * rate.block_s > 0.24:
        rate.decline()
        num_declined += 1
    assert 2 < num_declined < 50
    rate.observe(6, 6 * 0.05)
    assert 0.04 < rate.block_s < 0.05
