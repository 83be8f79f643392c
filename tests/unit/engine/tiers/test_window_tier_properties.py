"""Two engines with KV groups and tiers, one of which works for the other, in any order of calls.

The tiers' threads run when a rule lets them. Disks lose writes, and bits. Tokens are the oracle's,
and nothing is held at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tandem.common.perf_model.rates import PrefillRate
from tandem.engine.engine import Engine
from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.tiers import STALL_S
from tandem.engine.types import Mode, StepReport
from tests.engine_driver import make_spec
from tests.grouped_toy import GroupedToyRunner, continuation, make_grouped_engine
from tests.held_thread import FixedRate, HeldThread
from tests.late_device import WAYS, choose
from tests.unit.engine import test_kv_groups
from tests.unit.engine.test_kv_groups import ALL_WINDOWS, BLOCK_SIZES, MAX_MODEL_LEN, Request


class TieredPair(test_kv_groups.Pair):
    @initialize(
        windows=st.sampled_from(ALL_WINDOWS),
        block_size=st.sampled_from(BLOCK_SIZES),
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 4),
        tokens=st.integers(1, 9),
        launches_ahead=st.booleans(),
        host_tokens=st.sampled_from([30, 60, 200]),
        has_disk=st.booleans(),
        policy=st.sampled_from(["lru", "prefix", "priority", "value"]),
        block_s=st.sampled_from([0.0, 0.5, 2.0]),
        load_s_max=st.sampled_from([0.0, 2.0, 99.0]),
        way=st.sampled_from(WAYS),
    )
    def start(  # type: ignore[override]
        self,
        *,
        host_tokens: int,
        has_disk: bool,
        policy: str,
        block_s: float,
        load_s_max: float,
        way: str,
        **limits: Any,
    ) -> None:
        self.load_s_max = load_s_max
        self.settings = {"kv_host_bytes": 40 * host_tokens, "kv_tier_policy": policy}
        self.folder = Path(tempfile.mkdtemp(prefix="tiers-"))
        if has_disk:
            self.settings |= {"kv_disk_path": str(self.folder), "kv_disk_bytes": 1 << 15}
        self.has_disk, self.block_s, self.now = has_disk, block_s, 1.0
        self.threads: list[HeldThread] = []
        self.asked: list[Request] = []
        self.told: dict[str, set[bytes]] = {}  # that tiers have, here
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(make_tiers, "CHAIN_TOKENS", MAX_MODEL_LEN)
            choose(patch, way)
            test_kv_groups.Pair.start.__wrapped__(self, **limits)  # type: ignore[attr-defined]

    def _engine(
        self, block_size: int, num_blocks: int, max_num_seqs: int
    ) -> tuple[Engine, GroupedToyRunner]:
        engine, runner = make_grouped_engine(
            self.windows,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=self.tokens,
            start_thread=self.start_thread,
            report_block_tokens=True,
            **self.settings,
        )
        engine._tiers.clock = lambda: self.now
        engine._tiers.turn_s = 60.0
        rate = PrefillRate(step_s=0.5, token_s=1.0, token_context_s=0.0)
        engine._scheduler.loads._step_time = SimpleNamespace(prefill_rate=rate)  # type: ignore[assignment]
        for tier in engine._tiers.tiers:
            tier.rate = FixedRate(self.block_s)
        return engine, runner

    def run_threads(self) -> None:
        for thread in self.threads:
            thread.run(len(thread.jobs))

    def start_thread(self, name: str) -> HeldThread:
        self.threads.append(HeldThread())
        return self.threads[-1]

    @precondition(lambda self: any(thread.jobs for thread in self.threads))
    @rule(number=st.integers(0, 9), num_jobs=st.sampled_from([1, 2, 99]))
    def run_jobs(self, number: int, num_jobs: int) -> None:
        self.threads[number % len(self.threads)].run(num_jobs)

    @rule(is_here=st.booleans())
    def evict(self, is_here: bool) -> None:
        """The threads write what they can. Then others need a pool, and all leaves it that nobody
        references."""
        for _ in range(3):
            self.run_threads()
            self.step(3)
        (self.here if is_here else self.there)._kv.drop_cached()

    @precondition(lambda self: self.asked and len(self.requests) < 4)
    @rule(data=st.data(), mode=st.sampled_from([Mode.LOCAL, Mode.WAITING_FOR_REMOTE_KV]))
    def return_to_a_chat(self, data: st.DataObject, mode: Mode) -> None:
        """A prompt goes on from an earlier one, or from its answer."""
        asked = data.draw(st.sampled_from(self.asked))
        before = [*asked.spec.token_ids, *asked.expected][: MAX_MODEL_LEN - 4]
        cut = data.draw(st.integers(0, 3))
        prompt = [*before[: len(before) - cut], *data.draw(st.sampled_from([[], [1], [0, 1]]))]
        self.num_added += 1
        spec = make_spec(str(self.num_added), prompt, mode=mode, max_tokens=3)
        num_tokens = min(3, MAX_MODEL_LEN - len(prompt))
        if prompt:
            self.enter(Request(spec, continuation(prompt, num_tokens, self.windows)))

    def enter(self, request: Request) -> None:
        super().enter(request)
        if request.sequence_id in self.requests and request.spec.kv_budget is None:
            self.asked.append(request)

    @rule(seconds=st.sampled_from([STALL_S / 2, STALL_S * 2]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.has_disk)
    @rule(group=st.integers(0, 2), is_full=st.booleans())
    def fill_disk(self, group: int, is_full: bool) -> None:
        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        groups = self.here._tiers.tiers[-1].groups
        storage: Any = groups[group % len(groups)].storage
        storage.write = fail if is_full else DiskStorage.write.__get__(storage)

    @precondition(lambda self: self.has_disk)
    @rule(group=st.integers(0, 2), at=st.integers(0, 400))
    def flip_bits(self, group: int, at: int) -> None:
        group %= len(self.windows)
        file = self.folder / "0" / (f"blocks-{group}" if group else "blocks")
        data = bytearray(file.read_bytes())
        data[at % len(data)] ^= 0xFF
        with file.open("r+b") as opened:
            opened.write(data)

    def take(self, report: StepReport) -> None:
        """Follows the tiers' blocks as a router does."""
        super().take(report)
        for change in report.tiers:
            told = self.told.setdefault(change.tier, set())
            for stored in change.stored:
                assert stored.block_hash not in told
                told.add(stored.block_hash)
            told.difference_update(change.removed)

    def teardown(self) -> None:
        if not hasattr(self, "here"):
            return
        for _ in range(2000):
            had_jobs = any(thread.jobs for thread in self.threads)
            self.run_threads()
            if not (had_jobs or self.requests or self.here.has_work() or self.there.has_work()):
                break
            self.step(1)
        assert not self.requests, "somebody never ends"
        for engine in (self.here, self.there):
            load = engine.load()
            assert (load.blocks_used, load.blocks_quarantined) == (0, 0)
            assert engine.stats().blocks_leaving == 0
            for tier in engine._tiers.tiers:
                assert all(group.pool.num_used == 0 for group in tier.groups)
        for tier in self.here._tiers.tiers:
            name = tier.storage.name
            assert set(self.here.tier_block_hashes(name, b"", b"")) == self.told.get(name, set())
        for engine in (self.here, self.there):
            engine.close()
        shutil.rmtree(self.folder)


class LongTieredPair(TieredPair):
    """The same with many more examples: each run draws others."""


TieredPair.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestTieredPair = TieredPair.TestCase
LongTieredPair.TestCase.settings = settings(max_examples=600, stateful_step_count=30, deadline=None)
TestLong = pytest.mark.timeout(3600)(pytest.mark.slow(LongTieredPair.TestCase))
