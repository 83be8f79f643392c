"""Blocks of models with sliding windows come back from tiers, as far as the windows need them.

Toys say which blocks move; tiny models of real families have to answer the same, bit by bit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.common.perf_model.step_time import StepTimeModel
from tandem.common.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.disk.manifest import HEADER_BYTES
from tandem.engine.tiers.tier import LoadRate
from tandem.engine.types import NewTokens
from tandem.errors import ConfigError
from tests.engine_driver import Outcome, make_spec
from tests.grouped_toy import STATE, Windows, continuation, make_grouped_engine
from tests.late_device import WAYS, choose
from tests.model_engines import make_model_engine
from tests.tiny_models import make_tiny_model

WAIT_S = 600.0
TIER_BYTES = 1 << 15  # each step checks each slot of a tier
ALL_WINDOWS: list[Windows] = [(None, 6), (10,), (None, 5, 13), (None, STATE), (None, 5, STATE)]
PLACES = ["host", "disk"]


@pytest.fixture(autouse=True)
def _loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads do not depend on how busy the machine is. Chains are short."""
    monkeypatch.setattr(LoadRate, "observe", lambda *_: None)
    monkeypatch.setattr(StepTimeModel, "prefill_rate", None)
    monkeypatch.setattr(make_tiers, "CHAIN_TOKENS", 64)


def toy(windows: Windows, place: str, folder: Path, **settings: Any) -> Engine:
    settings.setdefault("num_blocks", 16)
    settings.setdefault("max_num_seqs", 1)
    # The toys freeze more states than a tier expects.
    num_bytes = TIER_BYTES * (3 if STATE in windows else 1)
    if place == "host":
        settings.setdefault("kv_host_bytes", num_bytes)
    else:
        settings |= {"kv_disk_path": str(folder), "kv_disk_bytes": num_bytes}
    return make_grouped_engine(windows, max_tokens_per_step=8, **settings)[0]


def ask(engine: Engine, prompt: list[int], windows: Windows, **fields: Any) -> NewTokens:
    """Answers a prompt, compares it with the oracle, and lets the tiers do what they want to."""
    outcome = Outcome()
    engine.add(make_spec("asked", prompt, **fields))
    settle(engine, outcome)
    assert outcome.token_ids["asked"] == continuation(prompt, 5, windows)
    return outcome.ends["asked"]


def settle(engine: Engine, outcome: Outcome) -> None:
    deadline = time.monotonic() + WAIT_S
    while engine.has_work() or engine.awaits_threads():
        assert time.monotonic() < deadline
        if engine.has_work():
            outcome.take(engine.step())
            engine.check_integrity()
    load = engine.load()
    assert (load.blocks_used, load.blocks_quarantined) == (0, 0)
    assert engine.stats().blocks_leaving == 0


def prompt(number: int, num_tokens: int = 25) -> list[int]:
    return [number] * num_tokens


@pytest.mark.parametrize(
    ("windows", "place", "way"),
    [
        *((windows, place, WAYS[0]) for windows in ALL_WINDOWS for place in PLACES),
        *((ALL_WINDOWS[2], "host", way) for way in WAYS[1:]),
        (ALL_WINDOWS[0], "disk", WAYS[1]),
    ],
)
def test_blocks_that_left_the_pools_come_back(
    windows: Windows, place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, way)
    engine = toy(windows, place, tmp_path)
    for number in range(6):
        assert ask(engine, prompt(number), windows).num_cached_tokens == 0
    cached = ask(engine, prompt(0), windows).cached
    assert cached.total == 24
    assert getattr(cached, place) >= 8
    num_loaded = engine.stats().tiers[0].blocks_loaded
    seen = [
        24 // 4 if w is None else 1 if w == STATE else 6 - max(0, 24 + 1 - w) // 4 for w in windows
    ]
    assert num_loaded <= sum(seen), "a window loads what the next token sees, and no more"
    assert num_loaded > 0
    engine.close()


@pytest.mark.parametrize("windows", ALL_WINDOWS)
def test_a_restart_finds_the_disks_blocks(windows: Windows, tmp_path: Path) -> None:
    engine = toy(windows, "disk", tmp_path)
    for number in range(3):
        ask(engine, prompt(number), windows)
    engine.close()
    again = toy(windows, "disk", tmp_path)
    for number in range(3):
        assert ask(again, prompt(number), windows).cached == CachedTokens(disk=24)
    assert again.stats().tiers[0].blocks_bad == 0
    again.close()


@pytest.mark.parametrize("place", PLACES)
def test_of_a_window_little_is_written(place: str, tmp_path: Path) -> None:
    """The tier gets those of 26 blocks that are seen after the prompt and after the end, and then
    those of a reuse."""
    windows = (None, 6)
    engine = toy(windows, place, tmp_path, num_blocks=90, max_num_seqs=9)
    ask(engine, prompt(1, 100), windows)
    full, window = (group.pool for group in engine._tiers.tiers[0].groups)
    assert (full.num_cached, window.num_cached) == (26, 4)
    assert ask(engine, prompt(1, 81), windows).num_cached_tokens == 80
    assert window.num_cached > 4
    engine.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_window_that_left_its_pool_is_loaded_for_blocks_that_stayed(
    place: str, tmp_path: Path
) -> None:
    """The pool of the group without a window has all of the chain."""
    windows = (None, 6)
    engine = toy(windows, place, tmp_path, num_blocks=60)
    ask(engine, prompt(0), windows)
    pool = engine._kv.pools[1]
    while pool.num_cached:
        pool._evict()
    assert ask(engine, prompt(0), windows).cached == CachedTokens(device=16, **{place: 8})
    assert engine.stats().tiers[0].blocks_loaded == 2
    engine.close()


@pytest.mark.parametrize(("lost", "num_cached"), [(4, 0), (5, 20)])
def test_a_chain_whose_window_is_not_whole_is_no_hit(
    lost: int, num_cached: int, tmp_path: Path
) -> None:
    """Without the last block it is one at the depth before, for which a block more is kept."""
    windows = (None, 6)
    engine = toy(windows, "host", tmp_path)
    for number in range(6):
        ask(engine, prompt(number), windows)
    engine.add(make_spec("asked", prompt(0)))
    hashes = engine._sequences.find("asked").block_hashes
    engine.remove("asked")
    window = engine._tiers.tiers[0].groups[1].pool
    slot = window.find(hashes[lost])
    assert slot is not None
    window.mark_bad(hashes[lost])
    assert ask(engine, prompt(0), windows).num_cached_tokens == num_cached
    engine.close()


@pytest.mark.parametrize(
    ("windows", "file"),
    [((None, 6), "blocks"), ((None, 6), "blocks-1"), ((None, STATE), "blocks-1")],
)
def test_flipped_bits_are_computed_again_and_counted(
    windows: Windows, file: str, tmp_path: Path
) -> None:
    engine = toy(windows, "disk", tmp_path)
    ask(engine, prompt(0), windows)
    engine.close()
    path = tmp_path / "0" / file
    data = bytearray(path.read_bytes())
    size = engine.layout.groups[file == "blocks-1"].layout.block_bytes
    for at in range(0, 8 * size, size):
        data[at + 5] ^= 1
    path.write_bytes(data)
    again = toy(windows, "disk", tmp_path)
    assert ask(again, prompt(0), windows).num_cached_tokens == 0
    assert again.stats().tiers[0].blocks_bad >= 1
    for _ in range(3):
        again._kv.drop_cached()
        assert ask(again, prompt(0), windows).num_cached_tokens > 0
    again.close()


def test_what_a_tier_tells_of_can_be_loaded(tmp_path: Path) -> None:
    """Blocks after which a request may go on are told of, and those alone."""
    windows = (None, 6)
    engine = toy(windows, "disk", tmp_path)
    told: dict[str, set[bytes]] = {"disk": set()}

    def follow(outcome: Outcome) -> None:
        for change in (change for report in outcome.reports for change in report.tiers):
            told[change.tier].update(stored.block_hash for stored in change.stored)
            told[change.tier].difference_update(change.removed)

    for number in range(6):
        engine.add(make_spec("asked", prompt(number)))
        settle(engine, outcome := Outcome())
        follow(outcome)
    held = told["disk"]
    assert held == set(engine.tier_block_hashes("disk", b"", b""))
    engine.add(make_spec("asked", prompt(0)))
    hashes = engine._sequences.find("asked").block_hashes
    engine.remove("asked")
    assert hashes[5] in held
    assert hashes[2] not in held  # its window has passed it, and nobody wanted a copy
    engine.reset_prefix_cache()
    settle(engine, outcome := Outcome())
    follow(outcome)
    assert not held
    engine.close()


def test_a_tier_has_room_for_each_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv-host-memory is 64; it must be at least"):
        toy((None, 6), "host", tmp_path, kv_host_bytes=64)
    engine = toy((None, 6), "disk", tmp_path)
    assert sum(p.stat().st_size for p in (tmp_path / "0").iterdir()) <= TIER_BYTES
    assert all(group.pool.num_blocks > 20 for group in engine._tiers.tiers[0].groups)
    engine.close()


def test_another_model_clears_the_files_of_all_groups(tmp_path: Path) -> None:
    engine = toy((None, 5, 13), "disk", tmp_path)
    ask(engine, prompt(0), (None, 5, 13))
    engine.close()
    other = toy((None, 6), "disk", tmp_path)
    assert {p.name for p in (tmp_path / "0").iterdir()} == {
        *("lock", "blocks", "manifest", "blocks-1", "manifest-1")
    }
    assert ask(other, prompt(0), (None, 6)).num_cached_tokens == 0
    other.close()


def test_a_folder_with_one_manifest_lost_loses_that_group(tmp_path: Path) -> None:
    windows = (None, 6)
    engine = toy(windows, "disk", tmp_path)
    ask(engine, prompt(0), windows)
    engine.close()
    manifest = tmp_path / "0" / "manifest-1"
    manifest.write_bytes(manifest.read_bytes()[: HEADER_BYTES // 2])
    again = toy(windows, "disk", tmp_path)
    assert ask(again, prompt(0), windows).num_cached_tokens == 0
    again.close()


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("gpt-oss", "auto"),
        ("qwen3-next", "auto"),
        ("mistral-window", "auto"),
        ("gemma3", "int8"),
        ("deepseek-v3", "int8"),
        ("gemma4", "auto"),
        pytest.param("mimo-v2", "auto", marks=pytest.mark.slow),
        *(
            pytest.param(family, "auto", marks=pytest.mark.slow)
            for family in ("granite4", "falcon-h1", "nemotron-h", "lfm2", "olmo-hybrid")
        ),
        pytest.param("gemma3", "auto", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "auto", marks=pytest.mark.slow),
        ("deepseek-v4", "auto"),
    ],
)
def test_tiny_models_answer_the_same_wherever_their_kv_was(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    """Computed, in the device's pool, in host memory, on disk and there after a restart. A model
    with states resumes at a multiple of 64 tokens."""
    more = {"kv_lora_rank": 32} if (family, kv_dtype) == ("deepseek-v3", "int8") else {}
    folder = make_tiny_model(family, tmp_path / "model", **more)[0]
    tokens = [[(n * 7 + i * 13) % 200 + 2 for i in range(150)] for n in range(5)]

    def engine(**settings: Any) -> Engine:
        return make_model_engine(
            folder,
            num_blocks=14,
            max_num_seqs=1,
            max_tokens_per_step=64,
            kv_dtype=kv_dtype,
            kv_tier_policy="lru",
            numerics="invariant",
            **settings,
        )[0]

    def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], list[float], CachedTokens]:
        outcome = Outcome()
        params = SamplingParams(temperature=0, logprobs=1)
        engine.add(make_spec("asked", prompt, sampling=params, max_tokens=8))
        settle(engine, outcome)
        news = [new for report in outcome.reports for new in report.new_tokens]
        logprobs = [each.logprob for new in news for each in new.logprobs]
        return outcome.token_ids["asked"], logprobs, outcome.ends["asked"].cached

    plain = engine()
    depth = 128 if plain.layout.state_groups else 144
    expected = [answer(plain, prompt)[:2] for prompt in tokens]
    assert answer(plain, tokens[-1]) == (*expected[-1], CachedTokens(device=depth))
    for place, settings in {
        "host": {"kv_host_bytes": 1 << 22},
        "disk": {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 1 << 22},
    }.items():
        tiered = engine(**settings)
        for prompt, right in zip(tokens, expected, strict=True):
            assert answer(tiered, prompt) == (*right, CachedTokens())
        *loaded, cached = answer(tiered, tokens[0])
        assert tuple(loaded) == expected[0]
        assert cached.total == depth
        assert getattr(cached, place) >= 48  # of the others some may be in the pool still
        assert answer(tiered, tokens[0]) == (*expected[0], CachedTokens(device=depth))
        tiered.close()
    again = engine(**settings)
    for prompt, right in zip(tokens, expected, strict=True):
        assert answer(again, prompt) == (*right, CachedTokens(disk=depth))
    again.close()


def test_where_prompts_part_is_in_a_tier_from_the_second_on(tmp_path: Path) -> None:
    """The window at that place left the pool before the second prompt came."""
    windows = (None, 6)
    shared = [1, 2, 3] * 8
    # There is room for all that is copied, in the pool and in the tier, however late copies are.
    sizes = {"num_blocks": 64, "max_num_seqs": 8, "kv_host_bytes": 8 * TIER_BYTES}
    engine = toy(windows, "host", tmp_path, **sizes)
    found = []
    for own in (4, 5, 6, 7):
        found.append(ask(engine, [*shared, *[own] * 17], windows).num_cached_tokens)
        engine._kv.drop_cached()
    engine.close()
    assert found == [0, 0, 24, 24]


@pytest.mark.parametrize("place", PLACES)
def test_a_state_that_left_its_pool_is_loaded_for_blocks_that_stayed(
    place: str, tmp_path: Path
) -> None:
    """It is cached in the pool again, for the next request. If the blocks left and the state
    stayed, the blocks alone are loaded."""
    windows = (None, STATE)
    engine = toy(windows, place, tmp_path, num_blocks=60)
    ask(engine, prompt(0), windows)
    blocks, states = engine._kv.pools
    while states.num_cached:
        states._evict()
    assert ask(engine, prompt(0), windows).cached == CachedTokens(device=20, **{place: 4})
    assert engine.stats().tiers[0].blocks_loaded == 1
    assert ask(engine, prompt(0), windows).cached == CachedTokens(device=24)
    while blocks.num_cached:
        blocks._evict()
    assert ask(engine, prompt(0), windows).cached == CachedTokens(**{place: 24})
    assert engine.stats().tiers[0].blocks_loaded == 1 + 6
    engine.close()


def test_of_an_answer_the_last_state_is_written(tmp_path: Path) -> None:
    """It supersedes those before it. The prompt's last state is written, too."""
    windows = (None, STATE)
    engine = toy(windows, "host", tmp_path, num_blocks=60)
    first = prompt(0, 12)
    outcome = Outcome()
    engine.add(make_spec("asked", first, max_tokens=30))
    settle(engine, outcome)
    answer = outcome.token_ids["asked"]
    assert answer == continuation(first, 30, windows)
    slots = engine._tiers.tiers[0].groups[1].pool
    assert slots.num_cached == 2  # after 8 and 40 of the 41 tokens that have KV
    engine._kv.drop_cached()
    second = [*first, *answer, 7]
    assert ask(engine, second, windows).cached == CachedTokens(host=40)
    engine.close()


@pytest.mark.parametrize("windows", [(None, 6), (None, STATE), (None, 5, STATE)], ids=str)
@pytest.mark.parametrize("num_common", [24, 23])
def test_a_request_waits_for_a_load_only_if_it_can_resume_where_the_load_ends(
    windows: Windows, num_common: int, tmp_path: Path
) -> None:
    engine = toy(windows, "host", tmp_path, num_blocks=60, max_num_seqs=4)
    first = prompt(0)
    ask(engine, first, windows)
    engine._kv.drop_cached()
    other = [*first[:num_common], *[99] * (30 - num_common)]
    outcome = Outcome()
    engine.add(make_spec("a", first))
    engine.add(make_spec("b", other))
    outcome.take(engine.step())
    assert "a" in [each.sequence_id for each in engine._scheduler.loading]
    waiting = [each.sequence_id for each in engine._scheduler.waiting]
    assert waiting == (["b"] if num_common == 24 else [])
    settle(engine, outcome)
    assert outcome.token_ids["a"] == continuation(first, 5, windows)
    assert outcome.token_ids["b"] == continuation(other, 5, windows)
    engine.close()
