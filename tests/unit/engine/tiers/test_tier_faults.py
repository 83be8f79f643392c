"""A tier that fails or hangs takes nothing from the tiers beside it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tandem.engine.cache.block_table import UnfilledBlocks
from tandem.engine.cache.layout.block_layout import BlockLayout
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.device.blocks import BlocksInPlace, HostPages
from tandem.engine.tiers.host import HostStorage
from tandem.engine.tiers.io_thread import IoThread, JobThread
from tandem.engine.tiers.jobs import Load
from tandem.engine.tiers.slots.keep_policy import keep_policy
from tandem.engine.tiers.storage import Bytes, Entry
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import STALL_S, Tiers
from tests.held_thread import HeldThread

WAIT_S = 60.0
NUM_BLOCKS, BLOCK_BYTES = 64, 8
HASHES = [bytes([number]) * 16 for number in range(1, NUM_BLOCKS + 1)]  # of one chain


class Shelf(HostStorage):
    """A storage in memory, by the name of another one. It may be full, or hang, and its next reads
    may fail."""

    def __init__(self, name: str) -> None:
        pages = HostPages(np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8), is_device_accessible=False)
        super().__init__(pages, block_bytes=BLOCK_BYTES)
        self.name = name
        self.is_full = False
        self.errors: list[OSError] = []  # of the next reads
        self.answers = threading.Event()
        self.answers.set()

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(slot, entry, data)

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        self.answers.wait(WAIT_S)
        if self.errors:
            target[:] = 0xFF  # it may hold anything then
            raise self.errors.pop(0)
        super().read(slot, block_hash, target)


def num_copied(pool: BlockPool) -> int:
    """Returns the number of unreferenced blocks that a tier has as well."""
    return pool._cached.num(Copy.COMPLETE)


class Rig:
    """A pool, and tiers below it. Blocks of the chain are full of their number in it, plus 1."""

    def __init__(self, *storages: Shelf) -> None:
        layout = KvLayout.of_one(BlockLayout(NUM_BLOCKS, 1, 1, 1, 1, "float32"))
        self.rows = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.pool = BlockPool(NUM_BLOCKS)
        self.threads: dict[str, HeldThread] = {}
        self.tables: dict[str, list[int]] = {}
        self.now = 1.0
        tiers = [
            Tier(number, [storage], keep_policy("lru", NUM_BLOCKS, 1), layout)
            for number, storage in enumerate(storages)
        ]
        blocks = [BlocksInPlace(self.rows)]
        self.tiers = Tiers(
            *([self.pool], layout, blocks, tiers, self.start_thread),
            unquarantine=self.pool.unquarantine,
        )
        self.tiers.clock = lambda: self.now
        self.tiers.turn_s = 60.0

    def start_thread(self, name: str) -> JobThread:
        """Starts a thread that runs when it is told to."""
        self.threads[name] = HeldThread()
        return self.threads[name]

    def fill(self, first: int, end: int) -> None:
        """Stores blocks first..end - 1 of the chain, as a sequence that has computed them does."""
        chain = self.pool.match(HASHES[:first])
        for number in range(first, end):
            (block_id,) = self.pool.allocate(1) or [-1]
            self.rows[block_id] = number + 1
            self.pool.store(
                block_id,
                parent_id=chain[-1] if chain else None,
                parent_hash=HASHES[number - 1] if chain else b"",
                block_hash=HASHES[number],
            )
            chain.append(block_id)
        self.pool.release(chain[first:])

    def load(self, name: str, num_blocks: int) -> Load:
        """Begins to load the chain's first blocks, after the pool lost what it had."""
        self.pool.drop_cached()
        self.tables[name] = self.pool.allocate(num_blocks) or []
        self.rows[self.tables[name]] = 0
        wanted = [UnfilledBlocks(0, range(num_blocks), self.tables[name])]
        self.tiers.load(name, HASHES[:num_blocks], wanted)
        return self.tiers.find_load(name)

    def loaded(self, name: str) -> list[int]:
        """Returns the numbers in the blocks of a load."""
        return [int(each) for row in self.rows[self.tables[name]] for each in set(row)]

    def give_up(self, name: str) -> None:
        self.pool.quarantine(self.tiers.cancel_load(name))

    def turn(self, num_turns: int = 99) -> None:
        """Lets the tiers and their threads do what they can."""
        for _ in range(num_turns):
            self.tiers.settle()
            self.tiers.write()
            for thread in self.threads.values():
                thread.run(len(thread.jobs))

    def depths(self) -> list[int]:
        """Returns how many first blocks of the chain each tier has."""
        return [tier.depth(HASHES) for tier in self.tiers.tiers]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_full_disk_keeps_no_block_from_another_tier(is_first: bool) -> None:
    disk, other = Shelf("disk"), Shelf("other")
    disk.is_full = True
    rig = Rig(*((disk, other) if is_first else (other, disk)))
    rig.fill(0, NUM_BLOCKS)
    rig.turn()
    assert sorted(rig.depths()) == [0, NUM_BLOCKS]
    assert num_copied(rig.pool) == NUM_BLOCKS
    rig.tiers.check_integrity()
    full = rig.tiers.tiers[0 if is_first else 1]
    num_failures = full.num_write_failures
    assert 0 < num_failures < NUM_BLOCKS  # it was left alone since the first one


def test_a_disk_whose_writes_hang_keeps_no_block_from_another_tier() -> None:
    rig = Rig(Shelf("host"), Shelf("disk"))
    disk = rig.threads.pop("disk-writes")
    assert isinstance(disk, HeldThread)
    rig.fill(0, NUM_BLOCKS)
    rig.turn()
    num_hung = rig.tiers.tiers[0].num_written
    assert 0 < num_hung <= NUM_BLOCKS // 8
    rig.now += 2 * STALL_S
    rig.turn()
    assert rig.depths() == [NUM_BLOCKS, 0]
    assert num_copied(rig.pool) == NUM_BLOCKS - num_hung  # it may still read the others
    rig.tiers.check_integrity()
    rig.threads["disk-writes"] = disk
    rig.turn()
    assert rig.depths() == [NUM_BLOCKS, num_hung]
    assert num_copied(rig.pool) == NUM_BLOCKS
    assert not rig.tiers.is_busy
    rig.tiers.reset()
    rig.pool.drop_cached()
    rig.fill(0, 4)
    rig.turn()
    assert rig.depths() == [4, 4]  # it gets blocks again


def test_a_tier_that_works_does_not_hide_one_that_hangs() -> None:
    rig = Rig(Shelf("host"), Shelf("disk"))
    disk = rig.threads.pop("disk-writes")
    assert isinstance(disk, HeldThread)
    for number in range(4):
        rig.fill(number, number + 1)
        rig.turn()
        rig.now += 0.6 * STALL_S
    assert rig.depths() == [4, 0]
    assert len(disk.jobs) == 2  # the others came when it had ended none for longer than `STALL_S`
    assert num_copied(rig.pool) == 2  # it may still read the first ones
    rig.tiers.check_integrity()


def test_a_tier_is_not_taken_to_hang_with_another_one() -> None:
    """Its first write begins when the other tier has hung for some time."""
    host, disk = Shelf("host"), Shelf("disk")
    rig = Rig(host, disk)
    held = rig.threads.pop("disk-writes")
    rig.fill(0, 1)
    rig.turn()
    rig.now += 0.9 * STALL_S
    slow = rig.threads.pop("host-writes")
    rig.fill(1, 2)
    rig.turn()
    rig.now += 0.2 * STALL_S
    rig.fill(2, 3)
    rig.turn()
    assert isinstance(slow, HeldThread)
    assert isinstance(held, HeldThread)
    assert (len(slow.jobs), len(held.jobs)) == (2, 2)
    rig.threads |= {"host-writes": slow}
    rig.turn()
    assert rig.depths() == [3, 0]


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EIO])
def test_a_read_is_tried_again_after_an_error_that_may_be_over(number: int) -> None:
    disk = Shelf("disk")
    rig = Rig(disk)
    shelve(rig, 8)
    disk.errors = [OSError(number, os.strerror(number))]
    load = rig.load("a", 8)
    rig.turn()
    assert rig.tiers.take_ended() == [load]
    assert rig.loaded("a") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (rig.depths(), rig.tiers.tiers[0].num_bad) == ([8], 0)


@pytest.mark.parametrize(
    "numbers", [[errno.EIO, errno.EIO], [errno.EAGAIN, errno.EIO], [errno.EBADF]]
)
def test_a_block_that_cannot_be_read_twice_is_bad(numbers: list[int]) -> None:
    disk = Shelf("disk")
    rig = Rig(disk)
    shelve(rig, 8)
    disk.errors = [OSError(number, os.strerror(number)) for number in numbers]
    load = rig.load("a", 8)
    rig.turn()
    assert rig.tiers.take_ended() == [load]
    assert not disk.errors
    assert load.num_read == 0  # the last block was the first to be read
    assert (rig.depths(), rig.tiers.tiers[0].num_bad) == ([0], 1)  # nor is what was not read yet
    rig.tiers.check_integrity()


def test_a_step_that_handles_an_ended_load_leaves_writes_to_the_next_one() -> None:
    rig = Rig(Shelf("disk"))
    shelve(rig, 4)
    writes = rig.threads["disk-writes"].jobs
    load = rig.load("a", 4)
    rig.fill(5, 6)
    rig.tiers.write()
    assert not writes  # this step has started the load
    rig.threads["disk-loads"].run(1)
    assert rig.tiers.take_ended() == [load]
    rig.tiers.write()
    assert not writes
    rig.load("b", 4)
    rig.tiers.write()
    assert len(writes) == 1  # loads do not put off writes for ever


def test_a_load_goes_through_the_threads_of_its_tiers() -> None:
    rig = Rig(*map(Shelf, ("host", "disk", "store")))
    shelve(rig, 3, 5, 8)
    load = rig.load("a", 8)
    assert [part.tier for part in load.parts] == [0, 0, 0, 1, 1, 2, 2, 2]
    for name, num_read in (("store", 3), ("disk", 5), ("host", 8)):
        assert [n for n, thread in rig.threads.items() if thread.jobs] == [f"{name}-loads"]
        assert rig.tiers.take_ended() == []
        rig.threads[f"{name}-loads"].run(1)
        assert load.num_read == num_read
    assert rig.tiers.take_ended() == [load]
    assert load.num_read_by_tier == {"host": 3, "disk": 2, "store": 3}
    assert rig.loaded("a") == [1, 2, 3, 4, 5, 6, 7, 8]
    rig.tiers.check_integrity()


@pytest.mark.parametrize("num_taken", [4, 5])
def test_a_load_ends_before_a_tier_whose_parts_are_computed(num_taken: int) -> None:
    rig = Rig(Shelf("disk"), Shelf("store"))
    shelve(rig, 5, 8)
    load = rig.load("a", 8)
    load.take(num_taken)
    rig.threads["store-loads"].run(1)
    assert load.num_read == 3
    rig.threads["disk-loads"].run(1)
    assert rig.tiers.take_ended() == [load]
    assert load.num_read == 8 - num_taken
    assert rig.loaded("a") == [*[0] * num_taken, *range(num_taken + 1, 9)]


def test_a_load_that_goes_on_elsewhere_was_progress_of_its_tier() -> None:
    rig = Rig(Shelf("disk"), Shelf("store"))
    shelve(rig, 5, 8)
    first, second = rig.load("first", 8), rig.load("second", 8)
    rig.now += 0.75 * STALL_S
    rig.threads["store-loads"].run(1)
    assert (first.tier, second.tier) == (0, 1)
    rig.now += 0.75 * STALL_S
    assert rig.tiers.find_stalled() == []
    rig.now += 0.5 * STALL_S
    assert rig.tiers.find_stalled() == ["first", "second"]


@pytest.fixture
def real_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads: list[IoThread] = []

    def start(rig: Rig, name: str) -> JobThread:
        threads.append(IoThread(name))
        return threads[-1]

    monkeypatch.setattr(Rig, "start_thread", start)
    yield
    for thread in threads:
        thread.close(WAIT_S)


@pytest.mark.usefixtures("real_threads")
@pytest.mark.parametrize("on_disk", [8, 5])
def test_a_disk_that_hangs_holds_up_no_load_of_another_tier(on_disk: int) -> None:
    """Its blocks come from the store, also those that it has, and its thread alone waits for it."""
    disk, store = Shelf("disk"), Shelf("store")
    rig = Rig(disk, store)
    shelve(rig, on_disk, 8)
    disk.answers.clear()
    hung = rig.load("hung", 8)
    until(lambda: hung.num_begun == 8 - on_disk + 1)
    rig.now += 2 * STALL_S
    assert rig.tiers.find_stalled() == ["hung"]
    rig.give_up("hung")
    assert [each.num_blocks for each in rig.tiers.reach(HASHES)] == [0, 8]
    load = rig.load("next", 8)
    assert {part.storage.name for part in load.parts} == {"store"}
    until(lambda: rig.tiers.take_ended() == [load])
    assert rig.loaded("next") == [1, 2, 3, 4, 5, 6, 7, 8]
    disk.answers.set()
    until(lambda: rig.tiers.take_ended() == [] and not rig.tiers.num_fenced)
    assert [each.num_blocks for each in rig.tiers.reach(HASHES)] == [on_disk, 8]
    rig.tiers.check_integrity()


def test_a_tier_whose_load_stands_still_gives_what_no_other_one_has() -> None:
    """It stands still since the engine has chosen the load."""
    rig = Rig(Shelf("disk"), Shelf("store"))
    shelve(rig, 8, 3)
    rig.load("hung", 8)
    rig.now += 2 * STALL_S
    rig.give_up("hung")
    load = rig.load("next", 8)
    assert [(part.storage.name, part.chain_index) for part in load.parts] == [
        *(("store", index) for index in range(3)),
        *(("disk", index) for index in range(3, 8)),
    ]
    rig.turn()
    assert rig.tiers.take_ended() == [load]
    assert rig.loaded("next") == [1, 2, 3, 4, 5, 6, 7, 8]


def shelve(rig: Rig, *depths: int) -> None:
    """Lets each tier have so many first blocks of the chain."""
    shelves = [tier.storage for tier in rig.tiers.tiers]
    first = 0
    for end in sorted(depths):
        for shelf, depth in zip(shelves, depths, strict=True):
            assert isinstance(shelf, Shelf)
            shelf.is_full = depth < end
        rig.fill(first, end)
        while rig.pool.next_unwritten is not None or rig.tiers.is_busy:
            rig.turn()
        first = end
    assert rig.depths() == [*depths]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
