"""One tier: its storage and slots for each KV group, its measured load rate, and its counters.

For a KV group without a window a tier holds complete prefixes. For a group with a window it holds
the blocks that requests may need to resume (engine/cache/pool/window_pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.perf_model.rates import PrefillRate
from tandem.engine.cache.layout.kv_groups import KvLayout
from tandem.engine.cache.pool.block_events import BlockEvents
from tandem.engine.cache.resumable_depths import ResumableDepths
from tandem.engine.tiers.jobs import Target
from tandem.engine.tiers.slots.keep_policy import KeepPolicy
from tandem.engine.tiers.slots.slot_pool import SlotPool, WindowSlotPool
from tandem.engine.tiers.storage import Entry, Storage
from tandem.engine.types import StoredBlock, TierBlocks, TierStats

_WEIGHT = 0.3  # weight of the newest load in the average load rate
_DECLINE_FACTOR = 0.98


class TierGroup:
    """The storage, slots and events of one KV group in a tier."""

    def __init__(self, tier: int, storage: Storage, pool: SlotPool) -> None:
        self._tier = tier
        self.storage = storage
        self.pool = pool
        self.events = BlockEvents()
        self._being_written: set[bytes] = set()  # hashes of blocks that are being written
        parents = {entry.block_hash: entry.parent_hash for _, entry in storage.entries()}
        self.num_torn = storage.num_torn + pool.restore(storage.entries())
        for block_hash in pool.block_hashes(b"", b""):
            self._publish(Entry(block_hash, parents[block_hash]))

    def target(self, entry: Entry) -> Target | None:
        """Takes a slot to which the block can be written, and protects the parent's slot until
        `settle`.

        Returns None if the tier has a readable copy already, if it lacks the parent, if it has no
        slot to give, if the policy refuses the block, or if the storage is not ready.
        """
        if not self.storage.is_ready:
            return None
        is_rewrite = self.pool.find(entry.block_hash) is not None
        if is_rewrite:
            table = self.pool.hold_bad(entry.block_hash)
        elif not self.pool.policy.takes(entry.block_hash):
            return None
        else:
            parent_hash = self.pool.link(entry).parent_hash
            is_there = parent_hash in self._being_written or self.pool.find(parent_hash) is not None
            if parent_hash and not is_there:
                return None
            self.pool.await_child(parent_hash)
            table = self.pool.take_slot()
            if not table:
                self.pool.end_child(parent_hash)
        if not table:
            return None
        self._being_written.add(entry.block_hash)
        return Target(self._tier, self.storage, table, is_rewrite)

    def settle(self, entry: Entry, target: Target, *, is_current: bool) -> None:
        """Handles the end of a write. If `is_current` is False, the tier was reset during the
        write, and the block is dropped."""
        self._being_written.discard(entry.block_hash)
        is_new = target.is_written and is_current
        if is_new and not target.is_rewrite:
            is_new = self.pool.adopt(target.table[-1], entry)
        else:
            if is_new:
                self.pool.clear_bad(entry.block_hash)
            self.pool.release(target.table)
        if not target.is_rewrite:
            self.pool.end_child(self.pool.link(entry).parent_hash)
        if is_new:
            self._publish(entry)

    def learn(self, chain: Sequence[Entry]) -> None:
        """Adds blocks that another worker wrote to the storage, parents first. A copy that is
        marked as bad stays bad until this worker writes it again."""
        for entry in chain:
            if self.pool.find(entry.block_hash) is not None:
                continue
            parent_hash = self.pool.link(entry).parent_hash
            if parent_hash and self.pool.find(parent_hash) is None:
                return
            self.pool.await_child(parent_hash)
            table = self.pool.take_slot()
            is_taken = bool(table) and self.pool.adopt(table[-1], entry)
            self.pool.end_child(parent_hash)
            if not is_taken:
                return
            self._publish(entry)

    def mark_bad(self, block_hash: bytes) -> None:
        """Marks a copy as unreadable until it is written again."""
        if self.pool.has(block_hash):
            self.pool.mark_bad(block_hash)
            self.events.remove(block_hash)

    def take_lost(self) -> list[bytes]:
        """Returns the hashes of blocks whose bytes were found to be missing in the storage since
        the last call."""
        return [name for slot in self.storage.take_lost() if (name := self.pool.hash_of(slot))]

    def follow_evictions(self) -> list[bytes]:
        """Returns the hashes of the blocks evicted since the last call, and records the evictions
        as events. Leaves out blocks whose copies were unreadable."""
        removed = self.pool.take_removed()
        for block_hash in removed:
            self.events.remove(block_hash)
        return removed

    def _publish(self, entry: Entry) -> None:
        # The real index is not known here. Readers of the event only need to know whether the block
        # is the first of its chain (index 0).
        index = int(entry.parent_hash != b"")
        self.events.store(StoredBlock(entry.parent_hash, entry.block_hash, index=index))


class LoadRate:
    """The measured rate of loads from a tier. The scheduler uses it to decide whether to load
    blocks or to compute them.

    While the measured rate is too slow, the scheduler declines loads. Then nothing is measured, and
    a wrong rate would never be corrected. Therefore each declined load lowers the estimated seconds
    per block a little, until a load is tried again.
    """

    def __init__(self) -> None:
        self.block_s = 0.0  # seconds per block; 0.0: not measured

    def observe(self, num_blocks: float, seconds: float) -> None:
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (_WEIGHT if self.block_s else 1.0)

    def decline(self) -> None:
        """Records that a load was not made because of this rate."""
        self.block_s *= _DECLINE_FACTOR


class Tier:
    def __init__(
        self, number: int, storages: Sequence[Storage], policy: KeepPolicy, layout: KvLayout
    ) -> None:
        """`storages` has one storage for each KV group of the layout."""
        self.number = number
        self.policy = policy
        self.groups = [
            TierGroup(
                number,
                storage,
                (SlotPool if group.window is None else WindowSlotPool)(storage.num_slots, policy),
            )
            for storage, group in zip(storages, layout.groups, strict=True)
        ]
        self.rate = LoadRate()  # `block_s` is the time for one block of each KV group together
        self.paused_until = 0.0  # no write starts before this time, in seconds of the tiers' clock
        self.num_written = 0
        self.num_loaded = 0
        self.num_write_failures = 0
        self.num_bad = sum(group.num_torn for group in self.groups)
        self._depths = ResumableDepths(layout) if layout.has_windows else None

    @property
    def storage(self) -> Storage:
        """The storage of the first KV group. The name of this storage is the tier's name."""
        return self.groups[0].storage

    @property
    def pool(self) -> SlotPool:
        """The slots of the first KV group."""
        return self.groups[0].pool

    @property
    def is_ready(self) -> bool:
        return all(group.storage.is_ready for group in self.groups)

    def settle(self, group: int, entry: Entry, target: Target, *, is_current: bool) -> None:
        """Handles the end of a write. If `is_current` is False, the tier was reset during the
        write, and the block is dropped."""
        self.num_written += target.is_written
        self.num_write_failures += not target.is_written
        self.groups[group].settle(entry, target, is_current=is_current)

    def take_rate(self, rate: PrefillRate) -> None:
        """Passes the measured prefill rate to the policy. If this may lower the worth of blocks,
        the ranks of all slots are updated."""
        if self.policy.take_rate(rate):
            for group in self.groups:
                group.pool.reprice()

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a chain this tier can load now, for the first KV
        group. Returns 0 if the tier is not ready."""
        return self.pool.depth(block_hashes) if self.is_ready else 0

    def mark_bad(self, group: int, block_hash: bytes) -> None:
        """Marks a copy as unreadable until it is written again."""
        self.groups[group].mark_bad(block_hash)

    @property
    def has_events(self) -> bool:
        return any(group.events for group in self.groups)

    def take_events(self) -> TierBlocks:
        """Returns the blocks that became readable, and the hashes of those that are no longer
        readable. With sliding windows, only blocks after which a request can resume are listed."""
        events = [group.events.take() for group in self.groups]
        changed = events[0] if self._depths is None else self._depths.update(events)
        return TierBlocks(self.storage.name, *changed)

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h with `first` <= h < `end` of the blocks that events report as
        readable; an empty `end` means no upper bound."""
        if self._depths is None:
            return self.pool.readable_hashes(first, end)
        return self._depths.block_hashes(first, end)

    def stats(self) -> TierStats:
        """Returns the tier's current content and its counters since the start."""
        total = sum([group.pool.num_blocks for group in self.groups])
        return TierStats(
            name=self.storage.name,
            blocks_total=total,
            blocks_held=total - sum([group.pool.num_free for group in self.groups]),
            blocks_written=self.num_written,
            blocks_loaded=self.num_loaded,
            blocks_bad=self.num_bad,
            write_failures=self.num_write_failures,
            block_s=self.rate.block_s,
        )


def is_held(tiers: Sequence[Tier], group: int, block_hash: bytes) -> bool:
    """Returns whether one of these tiers has a readable copy of a KV group's block."""
    return any(tier.groups[group].pool.has(block_hash) for tier in tiers)
