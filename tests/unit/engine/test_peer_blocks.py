"""Chains without tokens on the toy runner's engine: held for a consumer, imported from a peer."""

from __future__ import annotations

import pytest

from tandem.common.worker_load import WorkerLoad
from tandem.engine.types import FinalBlocks, Held, Reserved, StoredBlock
from tandem.errors import InternalError, QueueFull
from tests.engine_driver import drive, drive_all, make_engine, make_spec
from tests.toy_runner import continuation

PROMPT = list(range(14))  # three full blocks of 4 and half of the fourth


def hashes(num_tokens: int = 12) -> list[bytes]:
    """Returns the hashes of the prompt's full blocks, as a peer's engine computes them."""
    engine, _ = make_engine()
    report = drive_all(engine, make_spec("a", PROMPT[:num_tokens], max_tokens=1)).reports[-1]
    return [stored.block_hash for stored in report.stored]


class TestPin:
    def test_names_what_is_cached_and_keeps_it_until_removed(self) -> None:
        engine, _ = make_engine(num_blocks=4)
        drive_all(engine, make_spec("warm", PROMPT[:9], max_tokens=1))
        engine.hold_prefix("h", hashes(), first_wanted_block=1)
        assert engine.has_work()
        report = engine.step()
        assert report.final_blocks == [FinalBlocks("h", 1, [1])]
        assert report.held == [Held("h", 2)]
        assert (report.load.num_leases, report.load.blocks_used) == (1, 2)
        assert engine.block_ids("h") == [0, 1]
        assert not engine.has_work()
        # Others need the whole pool: what is held stays.
        engine.add(make_spec("big", [7] * 9, max_tokens=1))
        drive(engine)
        assert engine.load().num_waiting == 1
        engine.remove("h")
        assert drive(engine).token_ids["big"] == continuation([7] * 9, 1)

    def test_of_nothing_is_told_so(self) -> None:
        engine, _ = make_engine()
        engine.hold_prefix("h", hashes())
        report = engine.step()
        assert (report.held, report.final_blocks) == ([Held("h", 0)], [])
        engine.remove("h")
        assert engine.load() == WorkerLoad(num_running_slots=64, chunk_tokens=512, blocks_total=16)
        assert engine.stats().blocks_free == 16

    def test_removed_before_it_was_told_is_not_heard_of(self) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", PROMPT, max_tokens=1))
        engine.hold_prefix("h", hashes())
        engine.remove("h")
        assert not engine.has_work()

    def test_the_same_blocks_are_held_twice(self) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", PROMPT, max_tokens=1))
        for name in ("h", "i"):
            engine.hold_prefix(name, hashes())
        engine.remove("h")
        engine.check_integrity()
        assert engine.load().blocks_used == 3


class TestImport:
    def test_what_came_is_cached_and_a_prompt_finds_it(self) -> None:
        engine, runner = make_engine()
        engine.import_blocks("c", hashes())
        report = engine.step()
        assert report.reserved == [Reserved("c", 0, [0, 1, 2])]
        assert (report.load.num_pulls, report.load.blocks_used) == (1, 3)
        runner.fill([0, 1, 2], PROMPT[:12], 0)
        engine.commit_import("c", 3)
        one, two, three = hashes()
        stored = engine.step().stored
        assert stored == [
            StoredBlock(b"", one),
            StoredBlock(one, two, index=1),
            StoredBlock(two, three, index=2),
        ]
        outcome = drive_all(engine, make_spec("a", PROMPT))
        assert outcome.ends["a"].num_cached_tokens == 12
        assert outcome.token_ids["a"] == continuation(PROMPT, 5)

    def test_a_part_is_kept_and_what_may_still_be_written_is_fenced(self) -> None:
        engine, runner = make_engine()
        engine.import_blocks("c", hashes())
        engine.step()
        runner.fill([0], PROMPT[:4], 0)
        engine.commit_import("c", 1, unsafe_blocks=[2])
        engine.check_integrity()
        load = engine.load()
        assert (load.blocks_cached, load.blocks_quarantined, load.blocks_used) == (1, 1, 0)

    def test_takes_free_blocks_only(self) -> None:
        engine, _ = make_engine(num_blocks=4)
        drive_all(engine, make_spec("warm", [7] * 12, max_tokens=1))
        assert engine.load().blocks_cached == 3
        engine.import_blocks("c", hashes())
        assert engine.step().reserved == [Reserved("c", 0, [3])]
        assert engine.load().blocks_cached == 3
        engine.commit_import("c", 0)
        assert engine.stats().blocks_free == 1

    def test_only_what_is_missing_is_asked_for_and_twins_are_dropped(self) -> None:
        engine, runner = make_engine()
        drive_all(engine, make_spec("warm", PROMPT[:5], max_tokens=1))
        engine.import_blocks("c", hashes())
        assert engine.step().reserved == [Reserved("c", 4, [1, 2])]
        drive_all(engine, make_spec("meanwhile", PROMPT[:9], max_tokens=1))
        runner.fill(engine.block_ids("c"), PROMPT[:12], 1)
        engine.commit_import("c", 3)
        engine.check_integrity()
        assert engine.load() == WorkerLoad(
            num_running_slots=64,
            chunk_tokens=512,
            queued_s=None,  # few steps were measured
            blocks_total=16,
            blocks_cached=3,
        )
        assert engine.stats().blocks_free == 13

    def test_given_up(self) -> None:
        engine, _ = make_engine()
        engine.import_blocks("c", hashes())
        engine.remove("c", unsafe_blocks=[1])
        engine.check_integrity()
        assert (engine.stats().blocks_free, engine.load().blocks_quarantined) == (15, 1)

    @pytest.mark.parametrize(("num_blocks", "unsafe"), [(0, []), (4, []), (3, [2])])
    def test_what_cannot_be_good_ends_it_with_its_blocks_fenced(
        self, num_blocks: int, unsafe: list[int]
    ) -> None:
        engine, _ = make_engine()
        drive_all(engine, make_spec("warm", PROMPT[:5], max_tokens=1))
        engine.import_blocks("c", hashes())
        with pytest.raises(InternalError):
            engine.commit_import("c", num_blocks, unsafe)
        engine.check_integrity()
        load = engine.load()
        assert (load.num_pulls, load.blocks_quarantined) == (0, len(unsafe))


def test_hot_prefixes_are_listed_the_most_lately_used_first() -> None:
    engine, _ = make_engine()
    drive_all(engine, make_spec("a", PROMPT[:13], max_tokens=1))
    drive_all(engine, make_spec("b", [*PROMPT[:8], 1, 1, 1, 1, 1], max_tokens=1))
    drive_all(engine, make_spec("c", [2] * 5, max_tokens=1))
    common, one, other = hashes()[:2], hashes()[2:], engine.hot_prefixes(99)[0]
    assert len(other) == 1
    assert engine.hot_prefixes(99) == [
        other,
        [*common, engine.hot_prefixes(99)[1][2]],
        [*common, *one],
    ]
    assert [len(chain) for chain in engine.hot_prefixes(5)] == [1, 3, 3]
    assert [len(chain) for chain in engine.hot_prefixes(3)] == [1, 2]
    assert engine.hot_prefixes(0) == []
    every = sorted({*common, *one, *other, *engine.hot_prefixes(99)[1]})
    assert sorted(engine.block_hashes(b"", b"")) == every
    assert sorted(engine.block_hashes(every[1], every[3])) == every[1:3]
    assert engine.block_hashes(every[-1], b"") == every[-1:]
    # What is in use is hotter than anything that was used.
    engine.hold_prefix("h", [*common, *one])
    assert engine.hot_prefixes(3) == [[*common, *one]]


def test_an_id_names_one_thing_and_the_number_of_chains_is_bounded() -> None:
    engine, _ = make_engine(queue_max=2)
    engine.hold_prefix("h", hashes())
    engine.add(make_spec("a", PROMPT))
    with pytest.raises(InternalError, match="a is already on this engine"):
        engine.import_blocks("a", hashes())
    with pytest.raises(InternalError, match="h is already on this engine"):
        engine.add(make_spec("h", PROMPT))
    with pytest.raises(InternalError, match="no import of KV blocks with the id h"):
        engine.commit_import("h", 0)
    engine.import_blocks("c", hashes())
    with pytest.raises(QueueFull):
        engine.hold_prefix("i", hashes())
