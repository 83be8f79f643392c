from __future__ import annotations

import pytest

from tandem.common.worker_load import GroupLoad, TierUse, WorkerLoad, held_shares

ONE = WorkerLoad(blocks_total=100, blocks_used=90)
FULL, WINDOW = GroupLoad(100, 90), GroupLoad(40, 30, sequence_blocks_max=8)
TWO = WorkerLoad(blocks_total=140, blocks_used=120, groups=(FULL, WINDOW))


def test_one_pool_is_told_by_the_totals() -> None:
    assert ONE.kv_use == 0.9
    assert [ONE.lacking_blocks(blocks) for blocks in (9.5, 10, 12.5)] == [-0.5, 0, 2.5]
    assert ONE.longest_sequence == 100
    unknown = WorkerLoad()
    assert (unknown.kv_use, unknown.lacking_blocks(50), unknown.longest_sequence) == (0, 0, 0)


def test_a_tiers_share_is_that_of_all_workers_together() -> None:
    one = (TierUse("host", 100, 100), TierUse("disk", 1000, 10))
    other = (TierUse("host", 300, 0), TierUse("store", 0, 0))
    assert held_shares([one, other, ()]) == {"host": 0.25, "disk": 0.01}


def test_of_several_pools_the_one_that_sees_furthest_is_in_use() -> None:
    assert TWO.kv_use == 0.9
    nearly_free = GroupLoad(100, 10)
    assert WorkerLoad(groups=(nearly_free, WINDOW)).kv_use == 0.1
    assert WorkerLoad(groups=(WINDOW, GroupLoad(40, 20, sequence_blocks_max=16))).kv_use == 0.5


@pytest.mark.parametrize(
    ("groups", "num_blocks", "num_sequences", "lacking"),
    [
        ((FULL, WINDOW), 10, 1, 0),  # of the window it takes 8, and 10 are free
        ((FULL, WINDOW), 12, 1, 2),  # the sum of the free blocks is 20
        ((GroupLoad(100, 50), WINDOW), 40, 1, -2),
        ((GroupLoad(100, 50), WINDOW), 40, 2, 6),
        ((GroupLoad(100, 50), GroupLoad(40, 37, 8)), 6, 1, 3),
        ((WINDOW,), 500, 1, -2),
    ],
)
def test_each_pool_must_have_what_is_taken_of_it(
    groups: tuple[GroupLoad, ...], num_blocks: int, num_sequences: int, lacking: int
) -> None:
    load = WorkerLoad(blocks_total=140, blocks_used=0, groups=groups)
    assert load.lacking_blocks(num_blocks, num_sequences) == lacking


def test_a_pool_bounds_a_sequence_unless_it_has_a_whole_window() -> None:
    assert TWO.longest_sequence == 100
    assert WorkerLoad(groups=(FULL, GroupLoad(7, 0, 8))).longest_sequence == 7
    assert WorkerLoad(groups=(WINDOW,)).longest_sequence == 0
