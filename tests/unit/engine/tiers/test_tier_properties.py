"""Any order of calls on an engine with tiers gives the oracle's tokens and breaks no block.

The tiers' threads run when a rule lets them, one job at a time. Disks lose writes, and bits.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tandem.common.perf_model.rates import PrefillRate
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MAX, Retention
from tandem.engine.tiers.disk.manifest import HEADER_BYTES, RECORD_BYTES
from tandem.engine.tiers.disk.storage import DiskStorage
from tandem.engine.tiers.tiers import STALL_S
from tandem.engine.types import StepReport
from tests.engine_machine import Client, EngineMachine
from tests.held_thread import FixedRate, HeldThread
from tests.late_device import WAYS, choose
from tests.unit.engine import test_engine_properties


class Machine(test_engine_properties.Machine):
    @initialize(
        host_slots=st.integers(0, 9),
        disk_slots=st.integers(0, 30),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 4),
        max_tokens_per_step=st.integers(1, 9),
        launches_ahead=st.booleans(),
        policy=st.sampled_from(["lru", "prefix", "priority", "value"]),
        block_s=st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]),
        pin_share=st.sampled_from([0.0, 0.5, 1.0]),
        turn_s=st.sampled_from([0.0, 60.0]),
        load_s_max=st.sampled_from([0.0, 2.0, 99.0]),
        way=st.sampled_from(WAYS),
    )
    def start(  # type: ignore[override]
        self,
        host_slots: int,
        disk_slots: int,
        policy: str,
        block_s: float,
        pin_share: float,
        turn_s: float,
        load_s_max: float,
        way: str,
        **limits: int,
    ) -> None:
        self.load_s_max = load_s_max
        self.block_s = block_s
        self.slots, self.policy = (host_slots, disk_slots), policy
        self.pin_share = pin_share
        self.threads: dict[str, HeldThread] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="tiers-"))
        with pytest.MonkeyPatch.context() as patch:
            choose(patch, way)
            EngineMachine.start.__wrapped__(self, **limits)  # type: ignore[attr-defined]
        self.tiers = self.engine._tiers
        self.now = 1.0
        self.told: dict[str, dict[bytes, bytes]] = {}  # block hash -> parent hash, by tier
        self.tiers.clock = self.engine.kept.clock = lambda: self.now
        self.tiers.turn_s = turn_s
        # Whatever the clock says: what comes soonest follows from these prices alone.
        rate = PrefillRate(step_s=0.5, token_s=1.0, token_context_s=0.0)
        self.engine._scheduler.loads._step_time = SimpleNamespace(prefill_rate=rate)
        for tier in self.tiers.tiers:
            tier.rate = FixedRate(self.block_s)

    def settings(self, block_size: int) -> dict[str, Any]:
        host_slots, disk_slots = self.slots
        block_bytes = 8 * block_size
        found: dict[str, Any] = {"kv_host_bytes": host_slots * block_bytes}
        found["kv_tier_policy"] = self.policy
        found["kv_pin_share"] = self.pin_share
        if disk_slots:
            found["kv_disk_path"] = str(self.folder)
            found["kv_disk_bytes"] = HEADER_BYTES + disk_slots * (block_bytes + RECORD_BYTES)
        return found

    def _add(self, client: Client) -> None:
        """Gives each request one of three priorities."""
        priority = (0, PRIORITY_DEFAULT, PRIORITY_MAX)[client.spec.num_prompt_tokens % 3]
        retention = Retention(priority=priority)
        client.spec = msgspec.structs.replace(client.spec, retention=retention)
        super()._add(client)

    def start_thread(self, name: str) -> HeldThread:
        self.threads[name] = HeldThread()
        return self.threads[name]

    @precondition(lambda self: any(thread.jobs for thread in self.threads.values()))
    @rule(number=st.integers(0, 3), num_jobs=st.sampled_from([1, 2, 99]))
    def run_jobs(self, number: int, num_jobs: int) -> None:
        threads = list(self.threads.values())
        threads[number % len(threads)].run(num_jobs)

    @rule(seconds=st.sampled_from([STALL_S / 2, STALL_S * 2]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(context_s=st.sampled_from([0.0, 1.0, 1e3]))
    def measure(self, context_s: float) -> None:
        """Blocks are worth something else, until the next admission tells the engine's own rate."""
        self.tiers.take_rate(PrefillRate(step_s=0.5, token_s=1.0, token_context_s=context_s))

    @rule(weight=st.sampled_from([1, 3]), index=st.integers(0, 9))
    def keep(self, weight: int, index: int) -> None:
        """Pins a chain for one of two tenants: that of its first block."""
        if chains := self.engine.hot_prefixes(99):
            chain = chains[index % len(chains)]
            retention = Retention(pin_s=STALL_S, weight=weight)
            tenant = b"a" if chain[0] < b"\x80" else b"b"
            kept = self.engine.kept.keep(tenant, retention, chain)
            assert kept.num_blocks == len(chain) or kept.reason

    @precondition(lambda self: self.slots[1])
    @rule(is_full=st.booleans())
    def fill_disk(self, is_full: bool) -> None:
        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        storage: Any = self.tiers.tiers[-1].storage
        storage.write = fail if is_full else DiskStorage.write.__get__(storage)

    @precondition(lambda self: self.slots[1])
    @rule(at=st.integers(0, 400))
    def flip_bits(self, at: int) -> None:
        file = self.folder / "0" / "blocks"
        data = bytearray(file.read_bytes())
        data[at % len(data)] ^= 0xFF
        with file.open("r+b") as opened:
            opened.write(data)

    def take(self, report: StepReport) -> None:
        """Follows the tiers' blocks as a router does."""
        super().take(report)
        for change in report.tiers:
            told = self.told.setdefault(change.tier, {})
            for stored in change.stored:
                assert stored.block_hash not in told
                told[stored.block_hash] = stored.parent_hash
            for block_hash in change.removed:
                del told[block_hash]

    def run_threads(self) -> bool:
        had_jobs = any(thread.jobs for thread in self.threads.values())
        for thread in self.threads.values():
            thread.run(len(thread.jobs))
        return had_jobs

    def end_all(self) -> None:
        super().end_all()
        assert self.engine.stats().blocks_leaving == 0
        for tier in self.tiers.tiers:
            assert tier.pool.num_used == 0
            name = tier.storage.name
            readable = self.engine.tier_block_hashes(name, b"", b"")
            assert set(readable) == self.told.get(name, {}).keys()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            for tier in self.tiers.tiers:
                tier.storage.close()
            shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
