"""One tier: its rate, what has happened in it, and for each KV group its storage and its slots.

A KV group without a window has whole prefixes in a tier. Of one with a window a tier has what
requests may need to go on (engine/cache/window_pool.py), and a chain can be read up to a depth at
which each window has all that the next token sees.
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

_WEIGHT = 0.3  # of the newest load
_FORGIVEN = 0.98


class TierGroup:
    """One KV group's blocks in a tier."""

    def __init__(self, tier: int, storage: Storage, pool: SlotPool) -> None:
        self._tier = tier
        self.storage = storage
        self.pool = pool
        self.events = BlockEvents()
        self._coming: set[bytes] = set()  # blocks that are written
        parents = {entry.block_hash: entry.parent_hash for _, entry in storage.entries()}
        self.num_torn = storage.num_torn + pool.restore(storage.entries())
        for block_hash in pool.block_hashes(b"", b""):
            self._tell(Entry(block_hash, parents[block_hash]))

    def target(self, entry: Entry) -> Target | None:
        """Takes a slot for a block that is not here; None if its parent is not here either, no
        slot is left, the policy does not take it, or the storage is not ready."""
        if not self.storage.is_ready:
            return None
        is_mended = self.pool.find(entry.block_hash) is not None
        if is_mended:
            table = self.pool.hold_bad(entry.block_hash)
        elif not self.pool.policy.takes(entry.block_hash):
            return None
        else:
            parent_hash = self.pool.link(entry).parent_hash
            is_there = parent_hash in self._coming or self.pool.find(parent_hash) is not None
            if parent_hash and not is_there:
                return None
            self.pool.await_child(parent_hash)
            table = self.pool.take_slot()
            if not table:
                self.pool.end_child(parent_hash)
        if not table:
            return None
        self._coming.add(entry.block_hash)
        return Target(self._tier, self.storage, table, is_mended)

    def settle(self, entry: Entry, target: Target, *, is_current: bool) -> None:
        """Takes what became of a write. One that is not current was forgotten meanwhile."""
        self._coming.discard(entry.block_hash)
        is_new = target.is_written and is_current
        if is_new and not target.is_mended:
            is_new = self.pool.adopt(target.table[-1], entry)
        else:
            if is_new:
                self.pool.mend(entry.block_hash)
            self.pool.release(target.table)
        if not target.is_mended:
            self.pool.end_child(self.pool.link(entry).parent_hash)
        if is_new:
            self._tell(entry)

    def learn(self, chain: Sequence[Entry]) -> None:
        """Takes blocks, parents first, that another worker wrote to the storage. Those that were
        read badly stay bad until they are written anew."""
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
            self._tell(entry)

    def mark_bad(self, block_hash: bytes) -> None:
        """The copy is not read any more, until it is written anew."""
        if self.pool.has(block_hash):
            self.pool.mark_bad(block_hash)
            self.events.remove(block_hash)

    def take_lost(self) -> list[bytes]:
        """Returns the blocks in slots that have lost their bytes since the last call."""
        return [name for slot in self.storage.take_lost() if (name := self.pool.name_of(slot))]

    def follow_evictions(self) -> list[bytes]:
        """Returns blocks that cannot be read any more since the last call, but bad ones."""
        removed = self.pool.take_removed()
        for block_hash in removed:
            self.events.remove(block_hash)
        return removed

    def _tell(self, entry: Entry) -> None:
        index = int(entry.parent_hash != b"")  # all that is known is whether it is the first
        self.events.store(StoredBlock(entry.parent_hash, entry.block_hash, index=index))


class LoadRate:
    """The rate of a tier, as measured: where loads are slower than the engine, blocks are computed.

    A load that seems slower than computing is not made, so nothing would measure it again. Each
    time the estimate shrinks a little, until a load is tried.
    """

    def __init__(self) -> None:
        self.block_s = 0.0  # 0.0: not measured

    def observe(self, num_blocks: float, seconds: float) -> None:
        block_s = seconds / num_blocks
        self.block_s += (block_s - self.block_s) * (_WEIGHT if self.block_s else 1.0)

    def decline(self) -> None:
        """A load was not made for the sake of this rate."""
        self.block_s *= _FORGIVEN


class Tier:
    def __init__(
        self, number: int, storages: Sequence[Storage], policy: KeepPolicy, layout: KvLayout
    ) -> None:
        """`storages` are those of the layout's KV groups."""
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
        self.rate = LoadRate()  # of blocks of all groups together
        self.paused_until = 0.0  # no write begins before, by the clock of all tiers
        self.num_written = 0
        self.num_loaded = 0
        self.num_write_failures = 0
        self.num_bad = sum(group.num_torn for group in self.groups)
        self._depths = ResumableDepths(layout) if layout.has_windows else None

    @property
    def storage(self) -> Storage:
        """The storage of the first KV group, which has the name of all."""
        return self.groups[0].storage

    @property
    def pool(self) -> SlotPool:
        """The slots of the first KV group."""
        return self.groups[0].pool

    @property
    def is_ready(self) -> bool:
        return all(group.storage.is_ready for group in self.groups)

    def settle(self, group: int, entry: Entry, target: Target, *, is_current: bool) -> None:
        """Takes what became of a write. One that is not current was forgotten meanwhile."""
        self.num_written += target.is_written
        self.num_write_failures += not target.is_written
        self.groups[group].settle(entry, target, is_current=is_current)

    def take_rate(self, rate: PrefillRate) -> None:
        """Values blocks by this measured rate of prefill from now on, if the policy does so."""
        if self.policy.take_rate(rate):
            for group in self.groups:
                group.pool.reprice()

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many first blocks of a chain the first KV group can read here now."""
        return self.pool.depth(block_hashes) if self.is_ready else 0

    def mark_bad(self, group: int, block_hash: bytes) -> None:
        """The copy is not read any more."""
        self.groups[group].mark_bad(block_hash)

    @property
    def has_events(self) -> bool:
        return any(group.events for group in self.groups)

    def take_events(self) -> TierBlocks:
        """Returns what can be read now and could not before, and what cannot any more. With
        windows these are blocks after which a request may go on."""
        events = [group.events.take() for group in self.groups]
        changed = events[0] if self._depths is None else self._depths.update(events)
        return TierBlocks(self.storage.name, *changed)

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns hashes that events told of, from `first` on and before `end`; empty `end`: to
        the last."""
        if self._depths is None:
            return self.pool.readable_hashes(first, end)
        return self._depths.block_hashes(first, end)

    def stats(self) -> TierStats:
        """Returns what it holds now and has done since the start."""
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
    """Returns whether one of these tiers has a block of a KV group."""
    return any(tier.groups[group].pool.has(block_hash) for tier in tiers)
