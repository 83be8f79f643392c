"""Which router runs the batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.net.files.folder import FolderStore
from tandem.router.batches.leader import BEAT_S, Leader

LOST_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "files", "files-url")


async def test_another_router_takes_over_only_a_lost_one(store: FolderStore) -> None:
    clock = Clock()
    one, two = (Leader(store, clock, LOST_S) for _ in range(2))
    assert await one.lead()
    for _ in range(10):
        clock.now += BEAT_S
        assert await one.lead()
        assert not await two.lead()
    # The first one stops for a while.
    clock.now += LOST_S - 0.1
    assert not await two.lead()
    clock.now += 0.2
    assert await two.lead()
    assert two.term == one.term + 1
    assert not await one.lead()
    assert await two.lead()


async def test_a_released_place_is_taken_at_once(store: FolderStore) -> None:
    clock = Clock()
    one, two, three = (Leader(store, clock, LOST_S) for _ in range(3))
    assert await one.lead()
    assert not await two.lead()
    await one.release()
    assert await two.lead()
    assert not await three.lead()


async def test_an_old_beat_is_no_sign_of_death(store: FolderStore) -> None:
    clock = Clock()
    one, two = (Leader(store, clock, LOST_S) for _ in range(2))
    assert await one.lead()
    assert not await two.lead()
    await two.rest()  # it saw no batches for an hour
    clock.now += 3600
    assert not await two.lead()
    assert await one.lead()


async def test_the_router_with_the_next_batch_need_not_wait(store: FolderStore) -> None:
    clock = Clock()
    one, two = (Leader(store, clock, LOST_S) for _ in range(2))
    assert await one.lead()
    await one.rest()
    assert await two.lead()
    assert not await one.lead()
    await one.rest()  # it rests again, and takes nothing away from the other
    assert await two.lead()
