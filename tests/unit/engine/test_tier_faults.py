"""A tier that fails or hangs takes nothing from the tiers beside it. Threads run when told to."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.cache.block_pool import BlockPool
from tandem.engine.cache.kv_groups import KvLayout
from tandem.engine.cache.layout import BlockLayout
from tandem.engine.tiers.device_blocks import BlocksInPlace, HostPages
from tandem.engine.tiers.host_storage import HostStorage
from tandem.engine.tiers.keep_policy import keep_policy
from tandem.engine.tiers.storage import Bytes, Entry
from tandem.engine.tiers.tier import Tier
from tandem.engine.tiers.tiers import Tiers
from tests.held_thread import HeldThread

NUM_BLOCKS, BLOCK_BYTES = 64, 8
HASHES = [bytes([number]) * 16 for number in range(1, NUM_BLOCKS + 1)]  # of one chain


class Shelf(HostStorage):
    """A storage in memory, by the name of another one."""

    def __init__(self, name: str) -> None:
        pages = HostPages(np.zeros(NUM_BLOCKS * BLOCK_BYTES, np.uint8), is_reached=False)
        super().__init__(pages, block_bytes=BLOCK_BYTES)
        self.name = name


class FullDisk(Shelf):
    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        raise OSError(28, "No space left on device")


class Rig:
    """A pool of blocks that are full of their ids plus 1, and tiers below it."""

    def __init__(self, *storages: Shelf) -> None:
        layout = KvLayout.of_one(BlockLayout(NUM_BLOCKS, 1, 1, 1, 1, "float32"))
        numbers = np.arange(1, NUM_BLOCKS + 1, dtype=np.uint8)
        self.rows = np.repeat(numbers[:, None], BLOCK_BYTES, axis=1)
        self.pool = BlockPool(NUM_BLOCKS)
        self.threads: dict[str, HeldThread] = {}
        self.now = 1.0
        tiers = [
            Tier(number, [storage], keep_policy("lru", NUM_BLOCKS, 1), layout)
            for number, storage in enumerate(storages)
        ]
        blocks = [BlocksInPlace(self.rows)]
        self.tiers = Tiers([self.pool], layout, blocks, tiers, self.start_thread)
        self.tiers.clock = lambda: self.now
        self.tiers.turn_s = 60.0

    def start_thread(self, name: str) -> HeldThread:
        self.threads[name] = HeldThread()
        return self.threads[name]

    def fill(self, first: int, end: int) -> None:
        """Stores blocks first..end - 1 of the chain, as a sequence that has computed them does."""
        parents = self.pool.match(HASHES[:first])
        for number in range(first, end):
            (block_id,) = self.pool.allocate(1) or [-1]
            parent_id = parents[-1] if parents else None
            parent_hash = HASHES[number - 1] if parents else b""
            names = {"parent_id": parent_id, "parent_hash": parent_hash}
            self.pool.store(block_id, **names, block_hash=HASHES[number])
            parents.append(block_id)
        self.pool.release(self.pool.match(HASHES[first:end]))

    def turn(self, num_turns: int = 99) -> None:
        """Lets the tiers and their threads do what they can."""
        for _ in range(num_turns):
            self.tiers.turn()
            for thread in self.threads.values():
                thread.run(len(thread.jobs))

    def depths(self) -> list[int]:
        """Returns how many first blocks of the chain each tier has."""
        return [tier.depth(HASHES) for tier in self.tiers.tiers]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_full_disk_keeps_no_block_from_another_tier(is_first: bool) -> None:
    disk, other = FullDisk("disk"), Shelf("other")
    rig = Rig(*((disk, other) if is_first else (other, disk)))
    rig.fill(0, NUM_BLOCKS)
    rig.turn()
    assert sorted(rig.depths()) == [0, NUM_BLOCKS]
    assert rig.pool.num_copied == NUM_BLOCKS
    rig.tiers.check_integrity()
    full = rig.tiers.tiers[0 if is_first else 1]
    num_failures = full.num_write_failures
    assert 0 < num_failures < NUM_BLOCKS  # it was left alone since the first one
