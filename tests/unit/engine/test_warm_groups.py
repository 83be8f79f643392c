"""A new engine with KV groups takes over what is cached at another one, chain by chain."""

from __future__ import annotations

import pytest

from tandem.engine.engine import Engine
from tandem.net.store.registry import KvCompatibility
from tests.engine_driver import drive, drive_all, make_spec
from tests.grouped_toy import GroupedToyRunner, Windows, continuation, make_grouped_engine
from tests.kv_indexer import KvIndexer

PROMPT = [1, 2, 3, 4] * 10


def make(windows: Windows, num_blocks: int = 60) -> tuple[Engine, GroupedToyRunner]:
    return make_grouped_engine(
        windows,
        num_blocks=num_blocks,
        max_num_seqs=2,
        max_tokens_per_step=8,
        report_block_tokens=True,
    )


def adopt(old: tuple[Engine, GroupedToyRunner], new: tuple[Engine, GroupedToyRunner]) -> list[int]:
    """Plays a new worker's Warmer and its pulls. Returns how many blocks moved for each chain."""
    moved = []
    for number, chain in enumerate(old[0].hot_prefixes(100)):
        name = str(number)
        new[0].import_blocks(name, chain)
        (reserved,) = new[0].step().reserved
        num_cached = reserved.num_cached_tokens // 4
        moved.append(len(reserved.block_ids))
        if not reserved.block_ids:
            new[0].remove(name)
            continue
        old[0].hold_prefix(name, chain, num_cached)
        report = old[0].step()
        (run,), (held,) = report.final_blocks, report.held
        assert held.num_blocks == len(chain)
        for source, target in zip(run.block_ids, reserved.block_ids, strict=True):
            new[1].block(new[0].layout, target).copy_(old[1].block(old[0].layout, source))
        new[0].commit_import(name, len(chain))
        old[0].remove(name)
        for engine in (old[0], new[0]):
            engine.check_integrity()
    return moved


@pytest.mark.parametrize("windows", [(None,), (None, 8), (None, 5, 13)])
def test_a_chain_with_its_last_windows_is_taken_over(windows: Windows) -> None:
    old, new = make(windows), make(windows)
    drive_all(old[0], make_spec("a", [*PROMPT, 5], max_tokens=1))
    seen = [group.blocks_seen for group in old[0].layout.groups if group.window is not None]
    assert adopt(old, new) == [10 + sum(seen)]
    outcome = drive_all(new[0], make_spec("b", [*PROMPT, 6], max_tokens=5))
    assert outcome.token_ids["b"] == continuation([*PROMPT, 6], 5, windows)
    assert outcome.ends["b"].num_cached_tokens == 40
    indexer = KvIndexer(4)
    for report in outcome.reports:
        indexer.follow(report)
    assert len(indexer.positions) == 11
    indexer.check_chains(new[0].block_hashes(b"", b""))


def test_a_chain_that_does_not_fit_whole_is_left() -> None:
    old, new = make((None, 8)), make((None, 8), num_blocks=8)
    drive_all(old[0], make_spec("a", [*PROMPT, 5], max_tokens=1))
    assert adopt(old, new) == [0]
    assert drive(new[0]).reports == []
    assert new[0].stats().blocks_free == new[0].load().blocks_total


def test_pools_of_windows_alone_name_no_chain() -> None:
    old = make((8,))
    drive_all(old[0], make_spec("a", [*PROMPT, 5], max_tokens=1))
    assert old[0].hot_prefixes(100) == []


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_the_layout_tells_whether_there_are_windows_alone(windows: Windows) -> None:
    engine, runner = make(windows)
    compatibility = KvCompatibility(
        model_fingerprint="toy",
        compute_dtype=runner.dtype_name,
        numerics=runner.numerics_name,
        block_size=4,
        kv_dtype=runner.kv_dtype_name,
        layout=engine.layout.describe(),
        hash_version=1,
    )
    assert compatibility.has_windows_only == (None not in windows)
