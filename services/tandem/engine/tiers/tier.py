"""One tier: its storage, the pool of its slots, its rate and what has happened in it."""

from __future__ import annotations

from tandem.engine.tiers.jobs import Target
from tandem.engine.tiers.load_rate import LoadRate
from tandem.engine.tiers.slot_pool import SlotPool
from tandem.engine.tiers.storage import Entry, Storage
from tandem.engine.types import TierLoad


class Tier:
    def __init__(self, number: int, storage: Storage) -> None:
        self.number = number
        self.storage = storage
        self.pool = SlotPool(storage.num_slots)
        self.rate = LoadRate()
        self._coming: set[bytes] = set()  # blocks that are written
        self.num_written = 0
        self.num_loaded = 0
        self.num_write_failures = 0
        self.num_bad = storage.num_torn + self.pool.restore(storage.entries())

    def target(self, entry: Entry) -> Target | None:
        """Takes a slot for a block that is not here; None if its parent is not here either, or
        no slot is left."""
        table = self.pool.hold_bad(entry.block_hash)
        is_mended = bool(table)
        if not is_mended:
            if self.pool.find(entry.block_hash) is not None:
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
        if target.is_written and is_current and not target.is_mended:
            self.pool.adopt(target.table[-1], entry)
            return
        if target.is_written and is_current:
            self.pool.mend(entry.block_hash)
        self.pool.release(target.table)

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
        )
