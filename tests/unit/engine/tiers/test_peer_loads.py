"""Blocks that left the pool are loaded from a tier for a peer, which then pulls them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tandem.common.block_hash import chain_root, hash_blocks
from tandem.common.cached_tokens import CachedTokens
from tandem.common.config.engine import EngineConfig
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.engine.engine import Engine
from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.storage import BadBlock
from tandem.engine.tiers.tier import LoadRate
from tandem.engine.types import FinalBlocks, Held, PeerLoadStats
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.grouped_toy import STATE, Windows, make_grouped_engine
from tests.grouped_toy import continuation as grouped_continuation
from tests.held_thread import FixedRate, HeldThread
from tests.late_device import WAYS, choose
from tests.toy_runner import ToyRunner, continuation, kv_of

WAIT_S = 600.0
LONG_S = 1000.0  # allowed for a load
HOST = {"kv_host_bytes": 1 << 15}
PROMPT = [0] * 25  # six full blocks of 4


@pytest.fixture(autouse=True)
def _loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads do not depend on how busy the machine is."""
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr(StepTimeModel, "prefill_rate", None)
    monkeypatch.setattr("tandem.engine.tiers.tiers.STALL_S", WAIT_S)
    monkeypatch.setattr(make_tiers, "CHAIN_TOKENS", 64)


def hashes(engine: Engine, token_ids: list[int] = PROMPT) -> list[bytes]:
    layout = engine.layout
    root = chain_root(
        model_fingerprint="toy",
        compute_dtype="float32",
        numerics=EngineConfig(model="toy").numerics,
        kv_dtype="float32",
        block_size=layout.block_size,
    )
    return hash_blocks(root, token_ids, layout.block_size)


def settle(engine: Engine, outcome: Outcome | None = None) -> Outcome:
    outcome = outcome or Outcome()
    deadline = time.monotonic() + WAIT_S
    while engine.has_work() or engine.awaits_threads():
        assert time.monotonic() < deadline
        if engine.has_work():
            outcome.take(engine.step())
            engine.check_integrity()
    return outcome


def evicted(**settings: Any) -> tuple[Engine, ToyRunner]:
    """Returns an engine that has the blocks of the prompt in its tier only."""
    engine, runner = make_engine(num_blocks=16, **{**HOST, **settings})
    engine.add(make_spec("first", PROMPT))
    settle(engine)
    engine._kv.drop_cached()
    settle(engine)
    return engine, runner


def held_by(outcome: Outcome) -> dict[str, int]:
    return {held.sequence_id: held.num_blocks for each in outcome.reports for held in each.held}


def lent_by(outcome: Outcome) -> list[FinalBlocks]:
    return [final for each in outcome.reports for final in each.final_blocks]


def check_idle(engine: Engine) -> None:
    load = engine.load()
    assert (load.blocks_used, load.blocks_quarantined, load.num_leases) == (0, 0, 0)
    assert engine.stats().blocks_leaving == 0
    assert all(group.pool.num_used == 0 for t in engine._tiers.tiers for group in t.groups)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("way", WAYS)
def test_a_peer_gets_what_left_the_pool(
    place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, way)
    disk = {"kv_host_bytes": 0, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 1 << 15}
    engine, runner = evicted(**(disk if place == "disk" else {}))
    engine.hold_prefix("h", hashes(engine), 1, LONG_S)
    assert engine.load().num_leases == 1
    outcome = settle(engine)
    assert held_by(outcome) == {"h": 6}
    (lent,) = lent_by(outcome)
    assert (lent.first_block, len(lent.block_ids)) == (1, 5)
    assert runner.read(lent.block_ids, 20) == kv_of(PROMPT)[4:24]
    stats = engine.stats()
    assert (stats.tiers[0].blocks_loaded, stats.peer_loads.results) == (6, {"loaded": 1})
    assert (stats.peer_loads.blocks, stats.peer_loads.seconds > 0) == (6, True)
    engine.remove("h")
    check_idle(engine)
    # The blocks stay cached, so a request of this worker finds them.
    engine.add(make_spec("again", PROMPT))
    outcome = settle(engine)
    assert outcome.token_ids["again"] == continuation(PROMPT, 5)
    assert outcome.ends["again"].cached == CachedTokens(device=24)
    engine.close()


def test_nothing_is_loaded_for_a_peer_that_does_not_allow_it() -> None:
    engine, _ = evicted()
    engine.hold_prefix("h", hashes(engine))
    assert engine.step().held == [Held("h", 0)]
    assert engine.stats().peer_loads == PeerLoadStats()
    engine.remove("h")
    check_idle(engine)
    engine.close()


def test_only_what_the_pool_lacks_is_loaded() -> None:
    engine, _ = evicted()
    engine.add(make_spec("part", PROMPT[:9], max_tokens=1))
    settle(engine)
    num_loaded = engine.stats().tiers[0].blocks_loaded
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    assert held_by(settle(engine)) == {"h": 6}
    assert engine.stats().tiers[0].blocks_loaded == num_loaded + 4
    engine.close()


def test_a_slow_tier_is_not_used() -> None:
    engine, _ = evicted()
    engine._tiers.tiers[0].rate = FixedRate(1.0)
    engine.hold_prefix("h", hashes(engine), 0, 5.9)
    assert engine.step().held == [Held("h", 0)]
    assert engine.stats().peer_loads.results == {"too_slow": 1}
    engine.remove("h")
    engine.hold_prefix("h", hashes(engine), 0, 6.1)
    assert held_by(settle(engine)) == {"h": 6}
    engine.close()


def test_running_sequences_keep_their_room() -> None:
    """The sequence has 6 of 16 blocks and will need 7 more, so a load gets 3."""
    engine, _ = evicted()
    outcome = Outcome()
    engine.add(make_spec("long", [1] * 24, max_tokens=25))
    outcome.take(engine.step())
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    settle(engine, outcome)
    assert held_by(outcome) == {"h": 3}
    assert outcome.token_ids["long"] == continuation([1] * 24, 25)
    assert outcome.ends["long"].num_preemptions == 0
    engine.remove("h")
    check_idle(engine)
    engine.close()


def test_without_room_nothing_is_loaded() -> None:
    engine, _ = evicted()
    engine.add(make_spec("long", [1] * 24, max_tokens=40))
    engine.step()
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    outcome = settle(engine)
    assert held_by(outcome) == {"h": 0}
    assert outcome.ends["long"].num_preemptions == 0
    assert engine.stats().peer_loads.results == {"no_room": 1}
    engine.close()


def test_loads_for_peers_take_half_of_the_pool() -> None:
    engine, _ = evicted(kv_host_bytes=1 << 16)
    prompts = [[number] * 25 for number in (1, 2)]
    for number, prompt in enumerate(prompts):
        engine.add(make_spec(str(number), prompt, max_tokens=1))
        settle(engine)
    engine._kv.drop_cached()
    for number, prompt in enumerate(prompts):
        engine.hold_prefix(f"h{number}", hashes(engine, prompt), 0, LONG_S)
    assert held_by(settle(engine)) == {"h0": 6, "h1": 2}
    engine.remove("h0")
    engine.remove("h1")
    check_idle(engine)
    engine.close()


def test_a_block_that_cannot_be_read_ends_the_load() -> None:
    engine, _ = evicted()
    engine.add(make_spec("part", PROMPT[:9], max_tokens=1))
    settle(engine)
    storage: Any = engine._tiers.tiers[0].storage
    read = storage.read

    def fail(slot: int, block_hash: bytes, target: Any) -> None:
        if block_hash == hashes(engine)[3]:
            raise BadBlock("its bits were flipped")
        read(slot, block_hash, target)

    storage.read = fail
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    outcome = settle(engine)
    assert held_by(outcome) == {"h": 2}
    assert engine.stats().peer_loads.results == {"failed": 1}
    engine.remove("h")
    check_idle(engine)
    engine.add(make_spec("again", PROMPT))
    assert settle(engine).token_ids["again"] == continuation(PROMPT, 5)
    engine.close()


class HeldThreads:
    """An engine whose tiers' threads wait for `run`, and its clock."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.threads: list[HeldThread] = []
        self.now = 1.0
        self.engine, _ = make_engine(num_blocks=num_blocks, start_thread=self._start, **HOST)
        self.engine._tiers.clock = lambda: self.now
        self.engine.add(make_spec("first", PROMPT))
        self.run()
        self.engine._kv.drop_cached()
        self.run()

    def _start(self, name: str) -> HeldThread:
        self.threads.append(HeldThread())
        return self.threads[-1]

    def steps(self, outcome: Outcome | None = None) -> Outcome:
        outcome = outcome or Outcome()
        while self.engine.has_work():
            outcome.take(self.engine.step())
            self.engine.check_integrity()
        return outcome

    def run(self) -> Outcome:
        outcome = self.steps()
        while any(thread.jobs for thread in self.threads):
            for thread in self.threads:
                thread.run(99)
            self.steps(outcome)
        return outcome

    @property
    def num_loaded(self) -> int:
        return self.engine.stats().tiers[0].blocks_loaded


def test_a_load_that_takes_too_long_is_given_up() -> None:
    rig = HeldThreads()
    engine = rig.engine
    engine.hold_prefix("h", hashes(engine), 0, 10.0)
    assert not engine.has_work()
    rig.now += 19.9
    assert not engine.has_work()
    rig.now += 0.2
    assert held_by(rig.steps()) == {"h": 0}
    assert engine.stats().blocks_leaving == 6  # the load may still write them
    assert engine.stats().peer_loads.results == {"given_up": 1}
    engine.remove("h")
    rig.run()
    check_idle(engine)
    engine.close()


def test_blocks_of_loads_that_were_given_up_count_in_the_share_of_peers() -> None:
    """A slow tier does not take one half of the pool after the other."""
    rig = HeldThreads()
    engine = rig.engine
    for name in "abcd":
        engine.hold_prefix(name, hashes(engine), 0, 10.0)
        rig.now += 20.1
        rig.steps()
        assert engine.stats().blocks_leaving <= 8  # of 16
    engine.add(make_spec("new", [7] * 9, max_tokens=2))
    assert "new" in rig.steps().ends
    for name in "abcd":
        engine.remove(name)
    rig.run()
    check_idle(engine)
    engine.close()


def test_a_peer_that_leaves_cancels_its_load() -> None:
    rig = HeldThreads()
    engine = rig.engine
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    engine.remove("h")
    engine.check_integrity()
    assert (engine.load().num_leases, engine.stats().blocks_leaving) == (0, 6)
    assert held_by(rig.run()) == {}
    assert engine.stats().peer_loads.results == {"cancelled": 1}
    check_idle(engine)
    engine.close()


def test_peers_that_want_the_same_blocks_share_a_load() -> None:
    rig = HeldThreads()
    engine = rig.engine
    longer = hashes(engine, [*PROMPT[:24], 5, 5, 5, 5])
    engine.hold_prefix("one", hashes(engine), 0, LONG_S)
    engine.hold_prefix("two", longer, 2, LONG_S)
    assert engine.load().num_leases == 2
    outcome = rig.run()
    assert held_by(outcome) == {"one": 6, "two": 6}
    assert rig.num_loaded == 6
    first, second = lent_by(outcome)
    assert first.block_ids[2:] == second.block_ids
    for name in ("one", "two"):
        engine.remove(name)
    check_idle(engine)
    engine.close()


def test_a_peer_goes_on_where_the_one_it_waited_for_has_left() -> None:
    rig = HeldThreads(num_blocks=24)
    engine = rig.engine
    for name in ("one", "two"):
        engine.hold_prefix(name, hashes(engine), 0, LONG_S)
    engine.remove("one")
    assert engine.has_work()
    assert held_by(rig.run()) == {"two": 6}
    engine.remove("two")
    check_idle(engine)
    engine.close()


def test_a_waiting_peer_that_leaves_is_forgotten() -> None:
    rig = HeldThreads()
    engine = rig.engine
    for name in ("one", "two"):
        engine.hold_prefix(name, hashes(engine), 0, LONG_S)
    engine.remove("two")
    assert held_by(rig.run()) == {"one": 6}
    engine.remove("one")
    check_idle(engine)
    engine.close()


def test_a_request_waits_for_the_load_of_a_peer_and_a_peer_for_that_of_a_request() -> None:
    rig = HeldThreads()
    engine = rig.engine
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    engine.add(make_spec("request", PROMPT))
    outcome = rig.run()
    assert outcome.token_ids["request"] == continuation(PROMPT, 5)
    assert outcome.ends["request"].cached == CachedTokens(device=24)
    engine.remove("h")
    assert rig.num_loaded == 6
    engine._kv.drop_cached()
    engine.add(make_spec("other", PROMPT))
    rig.steps()
    engine.hold_prefix("h", hashes(engine), 0, LONG_S)
    outcome = rig.run()
    assert held_by(outcome) == {"h": 6}
    assert outcome.ends["other"].cached == CachedTokens(host=24)
    assert rig.num_loaded == 12
    engine.remove("h")
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("windows", [(None, 6), (10,), (None, STATE), (None, 5, STATE)])
def test_with_windows_the_whole_chain_is_loaded_or_nothing(windows: Windows) -> None:
    size = {"kv_host_bytes": 3 << 15}
    engine, _ = make_grouped_engine(windows, max_tokens_per_step=8, num_blocks=16, **size)
    engine.add(make_spec("first", PROMPT))
    settle(engine)
    engine._kv.drop_cached()
    settle(engine)
    chain = hashes(engine)
    engine.hold_prefix("h", [*chain, b"?" * 16], 0, LONG_S)
    assert held_by(settle(engine)) == {"h": 0}
    engine.remove("h")
    engine.hold_prefix("h", chain, 0, LONG_S)
    assert held_by(settle(engine)) == {"h": 6}
    assert engine.stats().peer_loads.results == {"loaded": 1}
    engine.remove("h")
    check_idle(engine)
    engine.add(make_spec("again", PROMPT))
    outcome = settle(engine)
    assert outcome.token_ids["again"] == grouped_continuation(PROMPT, 5, windows)
    assert outcome.ends["again"].cached == CachedTokens(device=24)
    engine.close()
