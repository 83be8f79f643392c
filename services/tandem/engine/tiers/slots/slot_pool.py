"""The slots of one KV group in a tier: which block's copy each slot holds, and which copy is
evicted next.

A tier manages its slots as a KV pool manages its blocks: a slot is found by the hash of its block,
readers reference it, and leaves are evicted first. So the pool of slots is a `BlockPool`, with four
additions:

- Slots whose bytes could not be read are marked as bad.
- A slot is not evicted while a child of its block is being written.
- A tier on disk restores the slots of an earlier process when it starts.
- A policy ranks the leaves by their worth.

The rank of a leaf is updated only when the leaf would be evicted next. This suffices because a use
can only raise a leaf's worth. A new prefill rate may lower it: after `reprice`, all leaves are
updated, a few at each eviction.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.tiers.slots.keep_policy import KeepPolicy
from tandem.engine.tiers.storage import Entry

_REPRICED_AT_ONCE = 8  # number of slots whose ranks are updated at each eviction


class SlotPool(BlockPool):
    def __init__(self, num_slots: int, policy: KeepPolicy) -> None:
        """`policy` determines the worth of each slot's block."""
        super().__init__(num_slots)
        self.policy = policy
        self._indexes = [0] * num_slots  # the chain index of each slot's block
        self._bad: set[bytes] = set()  # hashes of copies that could not be read
        # hashes of blocks whose children are being written
        self._awaiting: Counter[bytes] = Counter()
        # The ranks of slots below this number are outdated after `reprice`: a block's worth may
        # have become lower than the rank says.
        self._num_old = 0

    def depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a chain have readable copies in this pool."""
        found = len(self.match(block_hashes))
        if not self._bad:
            return found
        return next((i for i in range(found) if block_hashes[i] in self._bad), found)

    def hold(self, block_hashes: Sequence[bytes]) -> list[int]:
        """References the slots that hold these blocks, until `release`. Returns the slots. The tier
        must have all of the blocks."""
        slots = list(map(self._by_hash.__getitem__, block_hashes))
        self._reference(slots)
        return slots

    def has(self, block_hash: bytes) -> bool:
        """Returns whether the tier has a readable copy of the block."""
        return self.find(block_hash) is not None and block_hash not in self._bad

    def hash_of(self, slot: int) -> bytes | None:
        """Returns the hash of a slot's block; None if the slot holds no block."""
        return self._blocks[slot].block_hash

    def mark_bad(self, block_hash: bytes) -> None:
        """Marks the copy of a block as unreadable. The copy keeps its slot until it is written
        again or evicted."""
        assert self.find(block_hash) is not None, "no slot has this block"
        self._bad.add(block_hash)

    def hold_bad(self, block_hash: bytes) -> list[int]:
        """References the slot of a bad copy that is to be written again, and the slots of its
        parents, until `release`.

        Returns these slots in the order of the chain, so the bad copy's slot is last. Returns an
        empty list if the copy is not bad, or is still being read.
        """
        slot = self.find(block_hash)
        if slot is None or block_hash not in self._bad or self._blocks[slot].num_references:
            return []
        chain = self.chain(slot)
        self._reference(chain)
        return chain

    def clear_bad(self, block_hash: bytes) -> None:
        """Marks a copy as readable after it was written again."""
        self._bad.discard(block_hash)

    def link(self, entry: Entry) -> Entry:
        """Returns the entry as this pool stores it. This class stores it with the block's parent,
        which must be stored before the block."""
        return entry

    def adopt(self, slot: int, entry: Entry) -> bool:
        """Caches a slot that was written, so that its block can be found.

        Returns False, and frees the slot, if the block's parent is not in the tier or another slot
        already has the block.
        """
        entry = self.link(entry)
        parent = self.find(entry.parent_hash) if entry.parent_hash else None
        if entry.parent_hash and parent is None:
            self.release([slot])
            return False
        self._indexes[slot] = 0 if parent is None else self._indexes[parent] + 1
        self._blocks[slot].worth = self._worth(slot, entry.block_hash)
        stored = self.store(
            slot, parent_id=parent, parent_hash=entry.parent_hash, block_hash=entry.block_hash
        )
        if parent is not None:
            self._cached.update(parent)
        self.release([stored])
        self._events.forget_stored()  # `take_removed` reports evictions only, not stored blocks
        return stored == slot

    def take_slot(self) -> list[int]:
        """Returns a list with one newly referenced slot. The list is empty if no slot is free and
        none can be evicted. A slot cannot be evicted while a child of its block is being
        written."""
        if not self.num_free:
            slot = self._cached.oldest(Copy.NONE)
            if slot is None or self._blocks[slot].worth == math.inf:
                return []
        return self.allocate(1) or []

    def await_child(self, parent_hash: bytes) -> None:
        """Protects a parent's slot from eviction while a child is being written, until `end_child`.

        The write of the parent may be in flight too, so that no slot has it yet. Ignores an empty
        hash, which means that the block has no parent.
        """
        if parent_hash:
            self._awaiting[parent_hash] += 1
            self._follow_worth(parent_hash)

    def end_child(self, parent_hash: bytes) -> None:
        """Records that the write of a child has ended, with or without success."""
        if parent_hash:
            self._awaiting[parent_hash] -= 1
            if not self._awaiting[parent_hash]:
                del self._awaiting[parent_hash]
                self._follow_worth(parent_hash)

    def _follow_worth(self, block_hash: bytes) -> None:
        slot = self.find(block_hash)
        if slot is not None:
            block = self._blocks[slot]
            self._clock += 1
            block.last_used = self._clock
            block.worth = self._worth(slot, block_hash)
            self._cached.update(slot)

    def _worth(self, slot: int, block_hash: bytes) -> float:
        if block_hash in self._awaiting:
            return math.inf
        return self.policy.worth(block_hash, self._indexes[slot])

    def reprice(self) -> None:
        """Marks the ranks of all slots as outdated, because the worth of some blocks may have
        become lower."""
        self._num_old = self.num_blocks

    def _reprice_some(self) -> None:
        end = self._num_old
        self._num_old = max(0, end - _REPRICED_AT_ONCE)
        for slot in range(self._num_old, end):
            block = self._blocks[slot]
            if block.block_hash is not None and not block.num_references:
                block.worth = self._worth(slot, block.block_hash)
                self._cached.update(slot)

    def _evict(self) -> Copy:
        """Frees the leaf with the lowest current worth. Before that, it updates the ranks of leaves
        whose worth has risen since they were ranked."""
        if self._num_old:
            self._reprice_some()
        while (slot := self._cached.oldest(Copy.NONE)) is not None:
            block = self._blocks[slot]
            assert block.block_hash is not None, f"slot {slot} is cached and has no hash"
            worth = self._worth(slot, block.block_hash)
            if worth <= block.worth:
                break
            block.worth = worth
            self._cached.update(slot)
        return super()._evict()

    def take_removed(self) -> list[bytes]:
        """Returns the hashes of the blocks evicted since the last call. Leaves out blocks whose
        copies were unreadable."""
        _, removed = self.take_events()
        readable = [block_hash for block_hash in removed if block_hash not in self._bad]
        self._bad.difference_update(removed)
        return readable

    def readable_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the hashes h with `first` <= h < `end` of the blocks with readable copies; an
        empty `end` means no upper bound."""
        return [h for h in self.block_hashes(first, end) if h not in self._bad]

    def restore(self, entries: Collection[tuple[int, Entry]]) -> int:
        """Restores the slots that an earlier process wrote. Returns the number of slots that were
        left out.

        A slot is left out if its block's parent is missing, or if another slot has the same block.
        The pool must be empty.
        """
        # If two slots have the same block, the later slot is used.
        slots = {entry.block_hash: slot for slot, entry in entries}
        children: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for slot, entry in entries:
            if slots[entry.block_hash] == slot:
                children[entry.parent_hash].append(entry.block_hash)
        self.policy.restore(slots)
        # Parents are restored before their children.
        reached = [(b"", block_hash) for block_hash in children[b""]]
        while reached:
            parent_hash, block_hash = reached.pop()
            after = children.get(block_hash, [])
            self._restore_slot(slots[block_hash], block_hash, slots.get(parent_hash), len(after))
            reached += [(block_hash, child) for child in after]
        taken = set(self._by_hash.values())
        self._free = [slot for slot in self._free if slot not in taken]
        return len(entries) - len(taken)

    def _restore_slot(
        self, slot: int, block_hash: bytes, parent: int | None, num_children: int
    ) -> None:
        """Restores a slot that no sequence references. The slot of its block's parent must be
        restored before."""
        block = self._blocks[slot]
        block.block_hash = block_hash
        block.parent_id = parent
        block.num_children = num_children
        self._indexes[slot] = 0 if parent is None else self._indexes[parent] + 1
        block.worth = self._worth(slot, block_hash)
        self._by_hash[block_hash] = slot
        self._unwritten[slot] = None
        self._cached.add(slot)


class WindowSlotPool(SlotPool):
    """The slots of a KV group with a window. Each block is stored and found without its parent, so
    the policy does not know how many tokens precede the block."""

    def link(self, entry: Entry) -> Entry:
        return Entry(entry.block_hash, b"")

    def restore(self, entries: Collection[tuple[int, Entry]]) -> int:
        return super().restore([(slot, self.link(entry)) for slot, entry in entries])
