"""One tier: its storage, the pool of its slots, its rate and what has happened in it."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.cache.block_events import BlockEvents
from tandem.engine.tiers.jobs import Target
from tandem.engine.tiers.keep_policy import KeepPolicy
from tandem.engine.tiers.load_rate import LoadRate
from tandem.engine.tiers.slot_pool import SlotPool
from tandem.engine.tiers.storage import Entry, Storage
from tandem.engine.types import StoredBlock, TierBlocks, TierLoad


class Tier:
    def __init__(self, number: int, storage: Storage, policy: KeepPolicy) -> None:
        self.number = number
        self.storage = storage
        self.policy = policy
        self.pool = SlotPool(storage.num_slots, policy)
        self.rate = LoadRate()
        self._coming: set[bytes] = set()  # blocks that are written
        self.num_written = 0
        self.num_loaded = 0
        self.num_write_failures = 0
        self._events = BlockEvents()
        parents = {entry.block_hash: entry.parent_hash for _, entry in storage.entries()}
        self.num_bad = storage.num_torn + self.pool.restore(storage.entries())
        for block_hash in self.pool.block_hashes(b"", b""):
            self._events.store(StoredBlock(parents[block_hash], block_hash))

    def target(self, entry: Entry) -> Target | None:
        """Takes a slot for a block that is not here; None if its parent is not here either, no
        slot is left, the policy does not take it, or the storage is not ready."""
        if not self.storage.is_ready:
            return None
        table = self.pool.hold_bad(entry.block_hash)
        is_mended = bool(table)
        if not is_mended:
            if self.pool.find(entry.block_hash) is not None:
                return None
            if not self.policy.takes(entry.block_hash):
                return None
            parent = self.pool.find(entry.parent_hash) if entry.parent_hash else None
            if parent is not None:
                self.pool.touch(parent)
            elif entry.parent_hash and entry.parent_hash not in self._coming:
                return None
            table = self.pool.allocate(1) or []
        if not table:
            return None
        self._coming.add(entry.block_hash)
        return Target(self.number, self.storage, table, is_mended)

    def settle(self, entry: Entry, target: Target, *, is_current: bool) -> None:
        """Takes what became of a write. One that is not current was forgotten meanwhile."""
        self._coming.discard(entry.block_hash)
        self.num_written += target.is_written
        self.num_write_failures += not target.is_written
        is_new = target.is_written and is_current
        if is_new and not target.is_mended:
            is_new = self.pool.adopt(target.table[-1], entry)
        else:
            if is_new:
                self.pool.mend(entry.block_hash)
            self.pool.release(target.table)
        if is_new:
            self._events.store(StoredBlock(entry.parent_hash, entry.block_hash))

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many first blocks of a chain can be read here now."""
        return self.pool.depth(block_hashes) if self.storage.is_ready else 0

    def learn(self, chain: Sequence[Entry]) -> None:
        """Takes first blocks of a chain, parents first, that another worker wrote to the storage.
        Those that were read badly stay bad until they are written anew."""
        for entry in chain:
            if self.pool.find(entry.block_hash) is not None:
                continue
            table = self.pool.allocate(1)
            if table is None or not self.pool.adopt(table[-1], entry):
                return
            self._events.store(StoredBlock(entry.parent_hash, entry.block_hash))

    def mark_bad(self, block_hash: bytes) -> None:
        """The copy could not be read."""
        self.num_bad += 1
        if self.pool.has(block_hash):
            self.pool.mark_bad(block_hash)
            self._events.remove(block_hash)

    def follow_evictions(self) -> list[bytes]:
        """Returns blocks that cannot be read any more since the last call, but bad ones."""
        removed = self.pool.take_removed()
        for block_hash in removed:
            self._events.remove(block_hash)
        return removed

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> TierBlocks:
        """Returns what can be read now and could not before, and what cannot any more."""
        return TierBlocks(self.storage.name, *self._events.take())

    def load(self) -> TierLoad:
        """Returns what it holds now and has done since the start."""
        return TierLoad(
            name=self.storage.name,
            blocks_total=self.pool.num_blocks,
            blocks_held=self.pool.num_cached + self.pool.num_used,
            blocks_written=self.num_written,
            blocks_loaded=self.num_loaded,
            blocks_bad=self.num_bad,
            write_failures=self.num_write_failures,
            block_s=self.rate.block_s,
        )
