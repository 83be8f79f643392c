"""Blocks that leave the pool come back from a tier, with the same tokens as if they were computed.

Threads are real here, and so are files. Tests wait for them by the engine's own words.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.perf_model.rates import PrefillRate
from tandem.common.perf_model.soonest import Producer
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.common.retention import Retention
from tandem.engine.engine import Engine
from tandem.engine.tiers.disk.manifest import HEADER_BYTES
from tandem.engine.tiers.tier import LoadRate
from tandem.engine.types import Mode, TierStats
from tandem.errors import ConfigError
from tandem.models.source import resolve
from tests.engine_driver import Outcome, make_engine, make_spec
from tests.late_device import WAYS, choose
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model
from tests.toy_runner import continuation

WAIT_S = 600.0
BLOCK_BYTES = 4 * 2 * 4  # of the toy: 4 tokens, K and V, fp32


@pytest.fixture(autouse=True, params=WAYS)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on a CPU, or on a device that copies blocks as late as it can."""
    choose(monkeypatch, request.param)


@pytest.fixture(autouse=True)
def _loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads do not depend on how busy the machine is."""
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr(StepTimeModel, "prefill_rate", None)
    monkeypatch.setattr("tandem.engine.tiers.tiers.STALL_S", WAIT_S)
    monkeypatch.setattr("tandem.engine.tiers.writes.HUNG_S", WAIT_S)


def run(engine: Engine, *prompts: list[int], salt: bytes = b"") -> Outcome:
    """Answers prompts one after the other, and lets the tiers finish what they do."""
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        engine.add(make_spec(str(number), prompt, cache_salt=salt))
        settle(engine, outcome)
        assert str(number) in outcome.ends
    return outcome


def settle(engine: Engine, outcome: Outcome) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.has_work() or engine.awaits_threads():
        assert time.monotonic() < deadline
        if engine.has_work():
            outcome.take(engine.step())
            engine.check_integrity()


def prompt(number: int, num_tokens: int = 25) -> list[int]:
    return [number] * num_tokens


def disk(folder: Path, **settings: Any) -> Engine:
    settings.setdefault("kv_disk_bytes", 1 << 15)
    settings.setdefault("kv_disk_path", str(folder))
    return make_engine(num_blocks=16, **settings)[0]


def tier(engine: Engine, number: int = 0) -> TierStats:
    return engine.stats().tiers[number]


# Tier -> its settings. "PATH" is an empty folder.
PLACES: dict[str, dict[str, Any]] = {
    "host": {"kv_host_bytes": 1 << 15},
    "disk": {"kv_disk_path": "PATH", "kv_disk_bytes": 1 << 15},
}


@pytest.mark.parametrize("place", PLACES)
def test_blocks_that_left_the_pool_come_back(place: str, tmp_path: Path) -> None:
    settings = {k: str(tmp_path) if v == "PATH" else v for k, v in PLACES[place].items()}
    engine, _ = make_engine(num_blocks=16, **settings)
    outcome = run(engine, *map(prompt, range(6)), prompt(0))
    for number in range(6):
        assert outcome.token_ids[str(number)] == continuation(prompt(number), 5)
    assert outcome.token_ids["6"] == continuation(prompt(0), 5)
    assert outcome.ends["0"].num_cached_tokens == 0
    assert outcome.ends["6"].cached == CachedTokens(**{place: 24})
    assert (tier(engine).name, tier(engine).blocks_loaded) == (place, 6)
    assert engine.stats().blocks_dropped == 0
    engine.close()


def test_blocks_are_written_while_their_sequence_runs() -> None:
    """A prompt that fills the pool has its copy when the next one needs the room."""
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15)
    engine.add(make_spec("long", prompt(0, 57), max_tokens=5))
    engine.step()
    deadline = time.monotonic() + WAIT_S
    while tier(engine).blocks_written < 14 and time.monotonic() < deadline:
        engine._tiers.settle()
        engine._tiers.write()
    assert engine.load().num_running == 1
    outcome = run(engine, prompt(1, 57), prompt(0, 57))
    assert outcome.ends["1"].cached == CachedTokens(host=56)
    assert engine.stats().blocks_dropped == 0
    engine.close()


def test_blocks_that_two_sequences_want_are_loaded_once() -> None:
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15)
    outcome = run(engine, *map(prompt, range(6)))
    for name in ("one", "two"):
        engine.add(make_spec(name, prompt(0)))
    settle(engine, outcome)
    assert outcome.token_ids["one"] == outcome.token_ids["two"] == continuation(prompt(0), 5)
    assert outcome.ends["one"].cached == CachedTokens(host=24)
    assert outcome.ends["two"].cached == CachedTokens(device=24)
    assert tier(engine).blocks_loaded == 6
    engine.close()


def test_reports_tell_what_can_be_loaded(tmp_path: Path) -> None:
    def follow(outcome: Outcome, told: dict[bytes, bytes]) -> dict[bytes, bytes]:
        for change in (change for report in outcome.reports for change in report.tiers):
            assert change.tier == "disk"
            told |= {stored.block_hash: stored.parent_hash for stored in change.stored}
            for block_hash in change.removed:
                del told[block_hash]
        return told

    engine = disk(tmp_path, kv_disk_bytes=HEADER_BYTES + 9 * (BLOCK_BYTES + 48))
    told = follow(run(engine, prompt(0), prompt(1)), {})
    assert told.keys() == set(engine.tier_block_hashes("disk", b"", b""))
    assert len(told) == 9
    engine.close()
    engine = disk(tmp_path, kv_disk_bytes=HEADER_BYTES + 9 * (BLOCK_BYTES + 48))
    again = Outcome()
    settle(engine, again)  # what the disk held is told at once
    assert follow(again, {}) == told
    engine.reset_prefix_cache()
    settle(engine, gone := Outcome())
    assert follow(gone, told) == {}
    assert engine.tier_block_hashes("disk", b"", b"") == []
    assert engine.tier_block_hashes("host", b"", b"") == []
    engine.close()


@pytest.mark.parametrize("is_sooner_elsewhere", [False, True])
def test_a_prompt_that_is_sooner_elsewhere_is_not_loaded(
    is_sooner_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker's sequence, for which a peer with a queue or without one could compute."""
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15)
    outcome = run(engine, *map(prompt, range(6)))
    engine._tiers.tiers[0].rate.block_s = 1.0  # of six
    monkeypatch.setattr(StepTimeModel, "prefill_rate", PrefillRate(0.0, 1.0, 0.0))
    producer = Producer(PrefillRate(0.0, 0.0, 0.0), 512, 0.0 if is_sooner_elsewhere else 100.0)
    spec = make_spec(
        "asked",
        prompt(0),
        mode=Mode.WAITING_FOR_REMOTE_KV,
        remote_prefill_min_tokens=4,
        producer=producer,
    )
    engine.add(spec)
    settle(engine, outcome)
    reserved = [each for report in outcome.reports for each in report.reserved]
    if is_sooner_elsewhere:
        assert [each.num_cached_tokens for each in reserved] == [0]
        engine.start_local_prefill("asked")
        settle(engine, outcome)
    assert outcome.ends["asked"].cached == CachedTokens(host=0 if is_sooner_elsewhere else 24)
    assert outcome.token_ids["asked"] == continuation(prompt(0), 5)
    engine.close()


def test_without_a_tier_they_are_computed_again() -> None:
    engine, _ = make_engine(num_blocks=16)
    assert run(engine, *map(prompt, range(6)), prompt(0)).ends["6"].num_cached_tokens == 0
    assert engine.stats().tiers == []


def test_a_restart_finds_the_disks_blocks(tmp_path: Path) -> None:
    engine = disk(tmp_path)
    run(engine, *map(prompt, range(3)))
    engine.close()
    again = disk(tmp_path)
    outcome = run(again, *map(prompt, range(3)))
    assert [outcome.ends[str(n)].num_cached_tokens for n in range(3)] == [24, 24, 24]
    assert [outcome.token_ids[str(n)] for n in range(3)] == [
        continuation(prompt(n), 5) for n in range(3)
    ]
    assert tier(again).blocks_bad == 0
    again.close()


def test_anothers_salt_finds_nothing(tmp_path: Path) -> None:
    engine = disk(tmp_path)
    run(engine, prompt(0), salt=b"one tenant")
    engine.close()
    again = disk(tmp_path)
    assert run(again, prompt(0), salt=b"another").ends["0"].num_cached_tokens == 0
    assert run(again, prompt(0), salt=b"one tenant").ends["0"].num_cached_tokens == 24
    again.close()


def test_another_model_clears_a_folder_that_nobody_uses(tmp_path: Path) -> None:
    engine = disk(tmp_path)
    run(engine, prompt(0))
    engine.close()
    other = disk(tmp_path, block_size=8)
    assert tier(other).blocks_held == 0
    assert run(other, prompt(0)).token_ids["0"] == continuation(prompt(0), 5)
    other.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "lock"]


def test_two_workers_have_a_folder_each(tmp_path: Path) -> None:
    one, two = disk(tmp_path), disk(tmp_path)
    run(one, prompt(1))
    run(two, prompt(2))
    one.close()
    two.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "lock"]
    one, two = disk(tmp_path), disk(tmp_path)
    assert run(one, prompt(1)).ends["0"].num_cached_tokens == 24
    assert run(two, prompt(2)).ends["0"].num_cached_tokens == 24
    one.close()
    two.close()


def damage(path: Path, how: str) -> None:
    """Damages the blocks of a chain of six on a disk."""
    data = np.fromfile(path, np.uint8)
    if how == "cut":
        os.truncate(path, 0)
    elif how == "cut in the middle of a block":
        os.truncate(path, 2 * BLOCK_BYTES + 3)
    elif how == "zeros":
        path.write_bytes(bytes(data.size))
    else:
        for number in map(int, how.split()):
            data[number * BLOCK_BYTES + 5] ^= 1
        data.tofile(path)


@pytest.mark.parametrize(
    "_blocks",
    [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])],
    indirect=True,
)
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    "how", ["cut", "cut in the middle of a block", "zeros", "5", "0 2 4", "0 1 2 3 4 5"]
)
def test_a_damaged_chain_is_computed_again_once(how: str, restarts: bool, tmp_path: Path) -> None:
    """Also its parts that were in the pool when the damage was found, and a longer prompt."""
    engine = disk(tmp_path)
    run(engine, prompt(0), prompt(1))
    if restarts:
        engine.close()
    damage(tmp_path / "0" / "blocks", how)
    if restarts:
        engine = disk(tmp_path)
    num_whole = []
    for use in range(7):
        engine._kv.drop_cached()
        if use == 0:
            run(engine, prompt(0)[:12])  # some of its first blocks are here
        outcome = run(engine, prompt(0))
        assert outcome.token_ids["0"] == continuation(prompt(0), 5)
        num_whole.append(outcome.ends["0"].num_cached_tokens == 24)
    assert num_whole.count(False) <= 1, num_whole
    before = tier(engine).blocks_bad
    engine._kv.drop_cached()
    assert run(engine, prompt(1)).token_ids["0"] == continuation(prompt(1), 5)
    if how == "cut":
        assert tier(engine).blocks_bad == before >= 12  # the first sign was for all prompts
    engine.close()


@pytest.mark.parametrize(("file", "num_cached"), [("blocks", 12), ("manifest", 8)])
def test_flipped_bits_are_computed_again_and_counted(
    file: str, num_cached: int, tmp_path: Path
) -> None:
    """The third of six blocks is bad, and those after it are loaded; or it is not known at all."""
    engine = disk(tmp_path)
    run(engine, prompt(0))
    engine.close()
    path = tmp_path / "0" / file
    data = bytearray(path.read_bytes())
    at = 2 * BLOCK_BYTES if file == "blocks" else HEADER_BYTES + 2 * 48  # the third block's
    data[at + 5] ^= 1
    path.write_bytes(data)
    again = disk(tmp_path)
    outcome = run(again, prompt(0))
    assert outcome.token_ids["0"] == continuation(prompt(0), 5)
    assert outcome.ends["0"].num_cached_tokens == num_cached
    assert tier(again).blocks_bad >= 1
    again.close()
    again = disk(tmp_path)  # what was bad was written anew
    assert run(again, prompt(0)).ends["0"].num_cached_tokens == 24
    again.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("ours")])
def test_a_full_disk_costs_no_answer(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: object) -> int:
        raise error

    engine = disk(tmp_path)
    monkeypatch.setattr("tandem.engine.tiers.disk.storage.os.pwrite", pwrite)
    outcome = run(engine, *map(prompt, range(6)), prompt(0))
    assert outcome.token_ids["6"] == continuation(prompt(0), 5)
    assert outcome.ends["6"].num_cached_tokens == 0
    assert tier(engine).write_failures > 0
    assert engine.stats().blocks_dropped > 0
    engine.close()


def test_a_full_tier_evicts_and_stays_within_its_size(tmp_path: Path) -> None:
    size = HEADER_BYTES + 9 * (BLOCK_BYTES + 48)
    engine = disk(tmp_path, kv_disk_bytes=size)
    outcome = run(engine, *map(prompt, range(8)), prompt(5))
    assert outcome.token_ids["8"] == continuation(prompt(5), 5)
    assert tier(engine).blocks_total == 9
    assert sum(p.stat().st_size for p in (tmp_path / "0").iterdir()) <= size
    engine.close()


def test_a_tier_by_value_takes_what_is_used_twice() -> None:
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15, kv_tier_policy="value")
    run(engine, prompt(0))
    assert tier(engine).blocks_held == 0
    run(engine, prompt(0))
    assert tier(engine).blocks_held == 7
    outcome = run(engine, *map(prompt, range(1, 6)), prompt(0))
    assert outcome.ends["5"].cached == CachedTokens(host=24)
    assert tier(engine).blocks_written == 7
    engine.close()


def test_a_tier_by_value_takes_what_a_prompt_reuses_that_waits_for_kv() -> None:
    """It is the second use of the blocks, long before the prompt's own can be stored."""
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 20, kv_tier_policy="value")
    outcome = run(engine, prompt(0))
    remote = {"mode": Mode.WAITING_FOR_REMOTE_KV, "remote_prefill_min_tokens": 4}
    engine.add(make_spec("waits", prompt(0) + prompt(1), **remote))
    settle(engine, outcome)
    assert engine.load().num_pulls == 1
    assert tier(engine).blocks_held == 6
    engine.start_local_prefill("waits")
    settle(engine, outcome)
    assert outcome.token_ids["waits"] == continuation(prompt(0) + prompt(1), 5)
    engine.close()


def test_a_tier_by_value_takes_what_is_to_be_kept_at_once() -> None:
    engine, _ = make_engine(num_blocks=16, kv_host_bytes=1 << 15, kv_tier_policy="value")
    engine.add(make_spec("kept", prompt(0), retention=Retention(returns=True)))
    settle(engine, Outcome())
    assert tier(engine).blocks_held == 7
    engine.close()


def test_a_reset_forgets_the_tiers_too(tmp_path: Path) -> None:
    engine = disk(tmp_path)
    run(engine, *map(prompt, range(6)))
    engine.reset_prefix_cache()
    settle(engine, Outcome())
    assert tier(engine).blocks_held == 0
    assert run(engine, prompt(0)).ends["0"].num_cached_tokens == 0
    engine.reset_prefix_cache()
    engine.close()
    again = disk(tmp_path)
    assert tier(again).blocks_held == 0
    again.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_host_bytes": 8}, "kv-host-memory is 8; it must be at least 32"),
        ({"kv_disk_path": "/dev/null/x"}, "kv-disk-path /dev/null/x cannot be used: "),
        ({"kv_disk_path": "{}", "kv_disk_bytes": 9}, "kv-disk-size is 9; it must be at least"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(ConfigError, match=message):
        make_engine(num_blocks=8, **given)


@pytest.mark.parametrize(
    ("family", "kv_dtype", "_blocks"),
    [
        ("", "auto", "in place"),
        ("llama", "auto", "staged"),
        ("llama", "int8", "in place"),
        ("llama", "int4", "in place"),
        ("deepseek-v3", "auto", "in place"),
        pytest.param("", "auto", "staged", marks=pytest.mark.slow),
        pytest.param("", "int8", "in place", marks=pytest.mark.slow),
        pytest.param("", "int4", "in place", marks=pytest.mark.slow),
    ],
    indirect=["_blocks"],
)
def test_a_real_models_tokens_are_those_without_a_tier(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    """SmolLM2, or a tiny model: a Llama, or one with latent attention."""
    folder = make_tiny_model(family, tmp_path)[0] if family else resolve("smollm2")
    vocabulary = 64 if family else 1000
    tokens = [[(n * 7 + i * 13) % vocabulary + 2 for i in range(70)] for n in range(3)]

    def answers(**settings: Any) -> tuple[list[list[int]], list[int]]:
        engine, _ = make_model_engine(
            folder, num_blocks=9, kv_dtype=kv_dtype, kv_tier_policy="lru", **settings
        )
        outcome = run(engine, *tokens, tokens[0])
        engine.close()
        names = [str(n) for n in range(4)]
        cached = [outcome.ends[name].num_cached_tokens for name in names]
        return [outcome.token_ids[name] for name in names], cached

    plain, none_cached = answers()
    # Every step checks every slot, and a tier of the default size has a million for tiny blocks.
    tiered, cached = answers(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=64 << 20)
    assert tiered == plain
    assert none_cached == [0, 0, 0, 0]
    assert cached == [0, 0, 0, 64]
