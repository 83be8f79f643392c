"""A load counts as ended, and its blocks as free of it, only when the device has copied them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.common.cached_tokens import CachedTokens
from tandem.engine.engine import Engine
from tandem.engine.tiers.device.blocks import Event, HostPages
from tandem.engine.tiers.device.staged_blocks import StagedBlocks, Stream
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.jobs import Load, LoadPart
from tandem.engine.tiers.storage import Bytes, Entry
from tandem.engine.tiers.tier import LoadRate
from tandem.engine.tiers.tiers import STALL_S
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.late_device import LateDevice, LateStream, stage
from tests.toy_runner import continuation

WAIT_S = 600.0
PROMPTS = [[number] * 25 for number in range(6)]  # 6 blocks of 4 tokens, and one token


class GatedDevice(LateDevice):
    """Makes no copy into the pool while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()
        self.pool = range(0)  # addresses

    def open_stream(self) -> Stream:
        return GatedStream(self)


class GatedStream(LateStream):
    def __init__(self, device: GatedDevice) -> None:
        super().__init__()
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        if target.data_ptr() in self._device.pool:
            self.queue(self._wait)
        return super().copy(target, source, after)

    def _wait(self) -> None:
        self._device.is_waiting.set()
        assert self._device.gate.wait(WAIT_S)


class Bench:
    """An engine with a host tier that has the prompts, of which the first left the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = GatedDevice()
        stage(monkeypatch, self.device)
        monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
        self.engine: Engine
        self.engine, runner = make_engine(num_blocks=24, kv_host_bytes=1 << 15)
        start = runner.kv.data_ptr()
        self.device.pool = range(start, start + runner.kv.nbytes)
        self.outcome = Outcome()
        self.now = 0.0
        self.engine._tiers.clock = lambda: self.now
        for number, prompt in enumerate(PROMPTS):
            self.engine.add(make_spec(f"first {number}", prompt))
            self.run_until(lambda: not self.engine.awaits_threads())

    def run_until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.engine.has_work() or not is_over():
            assert time.monotonic() < deadline
            if self.engine.has_work():
                self.outcome.take(self.engine.step())
                self.engine.check_integrity()

    def begin_load(self, name: str) -> None:
        """A load's first copy is on its way, and does not come there."""
        self.device.gate.clear()
        self.device.is_waiting.clear()
        self.engine.add(make_spec(name, PROMPTS[0]))
        self.run_until(self.device.is_waiting.is_set)

    @property
    def num_fenced(self) -> int:
        assert self.engine._tiers.num_fenced == self.engine._kv.num_quarantined
        return self.engine._tiers.num_fenced

    def tokens(self, name: str) -> list[int]:
        return self.outcome.token_ids[name]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_sequence_starts_when_its_copies_are_made(bench: Bench) -> None:
    bench.begin_load("late")
    assert "late" not in bench.outcome.token_ids
    assert bench.engine._tiers.is_busy
    assert bench.engine.stats().tiers[0].blocks_loaded == 0
    bench.device.gate.set()
    bench.run_until(lambda: "late" in bench.outcome.ends)
    assert bench.outcome.ends["late"].cached == CachedTokens(host=24)
    assert bench.tokens("late") == continuation(PROMPTS[0], 5)
    bench.engine.close()


def test_a_late_load_is_given_up_and_its_blocks_are_fenced(bench: Bench) -> None:
    """Others use the pool meanwhile; the late copies spoil none of their blocks."""
    bench.begin_load("late")
    bench.now += 2 * STALL_S
    bench.run_until(lambda: "late" in bench.outcome.ends)
    assert bench.tokens("late") == continuation(PROMPTS[0], 5)
    assert bench.outcome.ends["late"].num_cached_tokens == 0
    assert bench.num_fenced == 6
    for number in (3, 4, 5):
        prompt = [7 + number] * 40
        bench.engine.add(make_spec(f"other {number}", prompt, max_tokens=9))
        bench.run_until(lambda: f"other {number}" in bench.outcome.ends)  # noqa: B023
        assert bench.tokens(f"other {number}") == continuation(prompt, 9)
    assert bench.num_fenced == 6
    bench.device.gate.set()
    bench.run_until(lambda: bench.num_fenced == 0)
    bench.run_until(lambda: not bench.engine.awaits_threads())
    bench.engine.add(make_spec("again", PROMPTS[0]))
    bench.run_until(lambda: "again" in bench.outcome.ends)
    assert bench.tokens("again") == continuation(PROMPTS[0], 5)
    bench.engine.close()


def test_a_sequence_that_is_removed_leaves_its_blocks_to_the_copies(bench: Bench) -> None:
    bench.begin_load("gone")
    bench.engine.remove("gone")
    assert bench.num_fenced == 6
    bench.device.gate.set()
    bench.run_until(lambda: bench.num_fenced == 0)
    bench.engine.check_integrity()
    bench.engine.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_ends_early_has_made_the_copies_that_it_began(fails: bool) -> None:
    """It is given up, or cannot read on, when two of four blocks are on their way."""
    device = LateDevice()
    rows = torch.zeros(4, 8, dtype=torch.uint8)
    blocks = StagedBlocks(rows, device)
    storage = HostStorage(blocks.host_pages(4 * 8), block_bytes=8)
    for slot in range(4):
        storage.write(slot, Entry(bytes(16), b""), np.full(8, 1 + slot, np.uint8))
    ends: list[list[int]] = []

    class Reads(HostStorage):
        num_read = 0

        def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
            if fails and self.num_read == 2:
                raise OSError("it cannot be read")
            super().read(slot, block_hash, target)
            self.num_read += 1
            load.is_cancelled = self.num_read == 2 and not fails

    reads = Reads(HostPages(storage._slots.reshape(-1), is_device_accessible=True), block_bytes=8)
    load = Load(
        sequence_id="",
        chain=(),
        parts=[LoadPart(0, reads, slot, bytes(16), slot) for slot in range(4)],
        tables={},
        share=1.0,
        num_spared=0,
        channels=[[blocks.open_channel()]],
        after=blocks.mark(),
        clock=time.monotonic,
        on_end=lambda _: ends.append(rows[:, 0].tolist()),
        continue_in=lambda *_: pytest.fail("there is one tier"),
    )
    load()
    assert ends == [[0, 0, 3, 4]]
    assert load.num_read == 2
    assert (load.failed is not None) == fails
