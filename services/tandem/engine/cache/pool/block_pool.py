"""The blocks of one KV group: which of them sequences reference, and which hold the KV of a prefix
that a later request can reuse.

The pool knows block ids and hashes, but no tensors and no sequences. A block is in one of these
states:

    FREE --allocate--> USED --release--> FREE          (no hash, so it cannot be found again)
      ^                 | store (full, final)
      |                 v
      |               USED, hashed --release--> CACHED (no reference, found by `match`)
      |                 ^------- reserve ---------'|
      '---------- evict or drop, leaf first -------'
    USED --quarantine--> QUARANTINED --unquarantine--> FREE     (a pull or load may still write it)
    USED --release after `defer_frees`--> DEFERRED --free_deferred--> FREE  (a step still uses it)
    CACHED --evicted while a tier copies it--> LEAVING --end_write--> FREE

A leaf is a hashed block without hashed children. A hashed block never changes, so a tier
(engine/tiers) may copy it at any time. `allocate` takes blocks in this order, and never waits for a
copy:

    1. FREE blocks
    2. CACHED leaves that tiers have copied or do not want
    3. CACHED leaves that tiers have yet to copy
    4. pinned leaves (pins.py)

These invariants always hold, and `check_integrity` checks them:

- A table that references a hashed block references the block's parents too. So a CACHED block has
  no USED child, and eviction of leaves keeps every chain complete from its first block on
  (prefix-closed).
- A hash names one block. If a second block has the same content, `store` does not cache it: the
  caller gets the first block instead.
- A hashed block is full and never written again. A block without a hash has one reference, and only
  the sequence that holds this reference writes it.

If a prompt shares only the first tokens of a cached block, the sequence gets a copy of the block.
`children` finds the cached block, and `reserve` references it as `source` until the copy is made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.common.adapter import Adapter
from tandem.engine.cache.pool.block import Block, Copy
from tandem.engine.cache.pool.block_events import BlockEvents
from tandem.engine.cache.pool.cached_blocks import CachedBlocks
from tandem.engine.cache.pool.child_blocks import ChildBlocks
from tandem.engine.cache.pool.pins import Pins
from tandem.engine.types import StoredBlock


@dataclass(frozen=True, slots=True)
class Reservation:
    block_table: list[int]
    num_cached_blocks: int  # number of blocks at the start of the table whose KV is cached


class BlockPool:
    def __init__(self, num_blocks: int, *, report_tokens: bool = False) -> None:
        """With `report_tokens`, the events of stored blocks include their token ids."""
        self.num_blocks = num_blocks
        self.children = ChildBlocks()  # finds cached blocks by their parent and first tokens
        self.num_dropped = 0  # number of CACHED blocks that were evicted without a copy in a tier
        self.pins = Pins(0)
        self._blocks = [Block() for _ in range(num_blocks)]
        self._cached = CachedBlocks(self._blocks)
        # A stack: the block freed last is allocated first, because it may still be in the CPU's
        # caches. In a new pool, the lowest id is allocated first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_hash: dict[bytes, int] = {}
        self._quarantined: set[int] = set()
        self._deferred: list[int] | None = None  # None: released blocks become FREE at once
        self._leaving: set[int] = set()
        self._scratch: list[int] = []  # blocks that only steps use (window_pool.py)
        # Ids of the hashed blocks with Copy.NONE, in the order in which they were stored or last
        # used.
        self._unwritten: dict[int, None] = {}
        self._clock = 0
        self._events = BlockEvents(with_tokens=report_tokens)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks that `match` still finds."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return."""
        return self.num_free + self.num_cached - self._cached.num(Copy.WRITING)

    @property
    def num_used(self) -> int:
        others = self.num_free + self.num_cached + self.num_quarantined + self.num_leaving
        return self.num_blocks - others

    def match(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Returns the block ids of the longest cached prefix of a chain of block hashes. References
        no block."""
        found = []
        for block_hash in block_hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def can_reserve(
        self, block_hashes: Iterable[bytes], num_blocks: int, source: int | None = None
    ) -> bool:
        return self._fits(self.match(block_hashes), num_blocks, source)

    def reserve(
        self, block_hashes: Iterable[bytes], num_blocks: int, source: int | None = None
    ) -> Reservation | None:
        """Returns a table of `num_blocks` blocks that starts with the cached blocks of the chain
        `block_hashes`. The other blocks are newly allocated.

        Also references `source`, a block to copy from, which the caller releases after the copy.
        Returns None, and changes nothing, if there is not enough room.
        """
        matched = self.match(block_hashes)
        if not self._fits(matched, num_blocks, source):
            return None
        self._reference(matched if source is None else [*matched, source])
        fresh = self.allocate(num_blocks - len(matched))
        assert fresh is not None
        return Reservation([*matched, *fresh], len(matched))

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Returns `num_blocks` block ids, each with one reference and no hash. Returns None, and
        changes nothing, if too few blocks are available."""
        if num_blocks > len(self._free) and num_blocks > self.num_available:
            return None
        taken = []
        for _ in range(num_blocks):
            while not self._free:
                self.num_dropped += self._evict() in (Copy.NONE, Copy.LOST)
            taken.append(self._free.pop())
        for block_id in taken:
            self._blocks[block_id].num_references = 1
        return taken

    def release(self, block_table: Sequence[int]) -> None:
        """Drops one reference on each block of a table. The blocks must be in the order of the
        chain."""
        self._clock += 1
        self._drop_references(reversed(block_table), self._clock)

    def defer_frees(self) -> None:
        """From now on, blocks without a hash that lose their last reference do not become FREE
        before `free_deferred`. A step in flight may still read or write them, and a pull or a load
        from a tier does not wait for the step."""
        assert self._deferred is None
        self._deferred = []

    def free_deferred(self) -> None:
        """Frees the blocks that were released since `defer_frees`, because the step has ended."""
        self._free += self._deferred or ()
        self._deferred = None

    def pin(self, tenant: bytes, weight: int, chain: Sequence[bytes], until: float) -> int:
        """Pins the blocks of a chain of block hashes, so that they are evicted last (`Pins.pin`).

        Blocks of the chain that are not cached yet are pinned when they are cached. Returns the
        number of blocks that are pinned now.
        """
        num_pinned = self.pins.pin(tenant, weight, chain, until)
        self._follow_pins()
        return num_pinned

    def expire_pins(self, now: float) -> None:
        """Ends the pins that have expired."""
        if self.pins.are_due(now):
            self.pins.expire(now)
            self._follow_pins()

    def _follow_pins(self) -> None:
        for block_hash in self.pins.take_changed():
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                continue
            block = self._blocks[block_id]
            if not block.num_references:
                self._cached.discard(block_id)
            block.is_pinned = block_hash in self.pins
            if not block.num_references:
                self._cached.add(block_id)

    def drop_cached(self) -> int:
        """Frees all CACHED blocks, so that `match` finds only blocks that sequences use. Returns
        their number."""
        num_dropped = self.num_cached
        while self.num_cached:
            self._evict()
        return num_dropped

    @property
    def has_unwritten(self) -> bool:
        """True if a block waits to be offered to tiers."""
        return bool(self._unwritten)

    @property
    def next_unwritten(self) -> int | None:
        """Id of the next block to offer to tiers; None if no block waits. Blocks are offered in the
        order in which they were stored or last used, but a parent always comes before its
        children."""
        block_id = next(iter(self._unwritten), None)
        while block_id is not None and self._blocks[block_id].parent_id in self._unwritten:
            block_id = self._blocks[block_id].parent_id
        return block_id

    def hashes_of(self, block_id: int) -> tuple[bytes, bytes]:
        """Returns the hash of a hashed block and the hash of its parent, which is empty if it has
        no parent."""
        block = self._blocks[block_id]
        parent = None if block.parent_id is None else self._blocks[block.parent_id]
        assert block.block_hash is not None, f"block {block_id} has no hash"
        return block.block_hash, (parent and parent.block_hash) or b""

    def start_write(self, block_id: int) -> None:
        """Records that a lower tier starts to copy the block. The block is not allocated again
        until `end_write`."""
        self._set_copy(block_id, Copy.WRITING)

    def end_write(self, block_id: int, *, has_copy: bool) -> None:
        """Records that no lower tier reads the block any more. `has_copy` says whether a tier has a
        copy of the block now."""
        if block_id in self._leaving:
            self._leaving.remove(block_id)
            self._blocks[block_id].copy = Copy.NONE
            self._free.append(block_id)
        else:
            self._set_copy(block_id, Copy.COMPLETE if has_copy else Copy.LOST)

    def lose_copy(self, block_hash: bytes) -> None:
        """Records that no tier has a copy of this block any more."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None and self._blocks[block_id].copy is Copy.COMPLETE:
            self._set_copy(block_id, Copy.LOST)

    def renew_copy(self, block_hash: bytes) -> None:
        """Records that all tiers' copies of this block are unreadable. If the block is still in the
        pool, tiers may copy it again."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None and self._blocks[block_id].copy is Copy.COMPLETE:
            self._set_copy(block_id, Copy.NONE)
            self._unwritten[block_id] = None

    def _set_copy(self, block_id: int, copy: Copy) -> None:
        block = self._blocks[block_id]
        assert block.block_hash is not None, f"block {block_id} has no hash to be copied under"
        self._unwritten.pop(block_id, None)
        if block.num_references:
            block.copy = copy
            return
        self._cached.discard(block_id)
        block.copy = copy
        self._cached.add(block_id)

    def store(
        self,
        block_id: int,
        *,
        parent_id: int | None,
        parent_hash: bytes,
        block_hash: bytes,
        token_ids: Sequence[int] = (),
        index: int = 0,
        adapter: Adapter | None = None,
    ) -> int:
        """Caches a full block under its hash. Its KV must be computed completely. Parents must be
        stored before children.

        Returns the block that holds this content from now on. If another block with the same
        content is cached already, the caller's reference moves to that block, and `block_id` is
        freed. If `token_ids` is given, prompts that share only the block's first tokens can find
        the block too (`children`). The block's `index` in its chain and its `adapter` are only used
        in the event.
        """
        block = self._blocks[block_id]
        assert block.num_references == 1, f"block {block_id} is shared before it was stored"
        assert block.block_hash is None, f"block {block_id} is stored twice"
        twin = self._by_hash.get(block_hash)
        if twin is not None:
            self._reference((twin,))
            self.release([block_id])
            return twin
        if parent_id is not None:
            parent = self._blocks[parent_id]
            assert parent.block_hash == parent_hash, f"block {parent_id} is not the parent"
            parent.num_children += 1
        block.block_hash = block_hash
        block.parent_id = parent_id
        block.is_pinned = block_hash in self.pins
        self._by_hash[block_hash] = block_id
        self._unwritten[block_id] = None
        if token_ids:
            self.children.add(parent_hash, block_hash, token_ids)
        self._events.store(StoredBlock(parent_hash, block_hash, list(token_ids), index, adapter))
        return block_id

    def is_writable(self, block_id: int) -> bool:
        """Returns whether the sequence that holds the block may still write it: the block has one
        reference and no hash."""
        return bool(self.find_writable((block_id,), 0, 1))

    def find_writable(self, block_table: Sequence[int], first: int, end: int) -> list[int]:
        """Returns the indices from `first` to `end` - 1 of the blocks of a table that its sequence
        may still write."""
        blocks = self._blocks
        return [
            index
            for index in range(first, end)
            if (block := blocks[block_table[index]]).block_hash is None
            and block.num_references == 1
        ]

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Drops the only reference of each of these blocks, which a pull or a tier load may still
        write. They are not freed until `unquarantine`."""
        for block_id in block_ids:
            assert self.is_writable(block_id), f"block {block_id} is shared, and a read writes it"
            self._blocks[block_id].num_references = 0
            self._quarantined.add(block_id)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """Frees these blocks if they are quarantined. No pull or tier load can write them any
        more."""
        for block_id in block_ids:
            if block_id in self._quarantined:
                self._quarantined.remove(block_id)
                self._free.append(block_id)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns the net changes since the last call: (stored blocks, hashes of removed blocks).
        Stored blocks are listed parents first, removed ones children first."""
        return self._events.take()

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Returns the cached hashes h with `first` <= h < `end`; an empty `end` means no upper
        bound."""
        return [h for h in self._by_hash if first <= h and (not end or h < end)]

    def leaves(self) -> list[int]:
        """Returns the ids of hashed blocks without hashed children, the most recently used
        first."""
        blocks = self._blocks
        leaves = [b for b in self._by_hash.values() if not blocks[b].num_children]
        leaves.sort(key=lambda b: (blocks[b].num_references > 0, blocks[b].last_used), reverse=True)
        return leaves

    def chain(self, leaf: int) -> list[int]:
        """Returns the block ids of the chain that ends with `leaf`, a hashed block, from the first
        block on."""
        chain = []
        block_id: int | None = leaf
        while block_id is not None:
            chain.append(block_id)
            block_id = self._blocks[block_id].parent_id
        return chain[::-1]

    def num_lacking(self, block_hashes: Iterable[bytes], num_blocks: int) -> int:
        """Returns how many blocks too few the pool has for a table of `num_blocks` blocks that
        references those of `block_hashes` that are cached. Negative: so many blocks would still be
        available."""
        found = [self._by_hash[each] for each in block_hashes if each in self._by_hash]
        return num_blocks - len(found) - self._num_available_beside(found)

    def _fits(self, matched: list[int], num_blocks: int, source: int | None) -> bool:
        kept = matched if source is None else [*matched, source]
        return num_blocks - len(matched) <= self._num_available_beside(kept)

    def _num_available_beside(self, block_ids: Iterable[int]) -> int:
        """Returns how many blocks `allocate` could return if these blocks were referenced."""
        blocks = (self._blocks[block_id] for block_id in dict.fromkeys(block_ids))
        unreferenced = sum(
            not block.num_references and block.copy is not Copy.WRITING for block in blocks
        )
        return self.num_available - unreferenced

    def _drop_references(self, block_ids: Iterable[int], last_used: int) -> None:
        """Drops one reference on each of these blocks."""
        blocks, cached = self._blocks, self._cached
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.num_references > 0, f"block {block_id} is released once too often"
            block.num_references -= 1
            if block.num_references:
                continue
            if block.block_hash is None:
                (self._free if self._deferred is None else self._deferred).append(block_id)
                continue
            block.last_used = last_used
            cached.add(block_id)

    def _reference(self, block_ids: Iterable[int]) -> None:
        """Adds one reference on each of these blocks."""
        blocks, cached = self._blocks, self._cached
        lost, unwanted = Copy.LOST, Copy.UNWANTED
        for block_id in block_ids:
            block = blocks[block_id]
            is_cached = not block.num_references
            if is_cached:
                cached.discard(block_id)
            # The block is used again, so it is offered to tiers again. A block with a LOST copy is
            # offered even if other sequences use it too, because a system prompt may be in use all
            # the time.
            if block.copy is lost or (is_cached and block.copy is unwanted):
                block.copy = Copy.NONE
                self._unwritten[block_id] = None
            block.num_references += 1

    def _evict(self) -> Copy:
        """Evicts a CACHED leaf, which becomes FREE, or LEAVING if a tier is copying it. Returns the
        state of the copy in lower tiers."""
        return self._drop_hash(self._cached.pop())

    def _drop_hash(self, block_id: int) -> Copy:
        """Makes a block that was CACHED FREE or LEAVING, as `_evict` does."""
        block = self._blocks[block_id]
        assert block.block_hash is not None, f"block {block_id} is evicted and was not cached"
        del self._by_hash[block.block_hash]
        self._events.remove(block.block_hash)
        self.children.remove(block.block_hash)
        self._unwritten.pop(block_id, None)
        if block.is_pinned:
            self.pins.forget(block.block_hash)
            block.is_pinned = False
        copy = block.copy
        if block.parent_id is not None:
            parent = self._blocks[block.parent_id]
            parent.num_children -= 1
            self._cached.update(block.parent_id)
        block.block_hash = block.parent_id = None
        if copy is Copy.WRITING:
            self._leaving.add(block_id)
        else:
            block.copy = Copy.NONE
            self._free.append(block_id)
        return copy

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if the pool is inconsistent. `block_tables` must include every
        table that references blocks."""
        expected = Counter(block_id for table in block_tables for block_id in table)
        cached = _check_blocks(self._blocks, self._by_hash, expected)
        self._check_sets(expected, cached)

    def copies(self) -> list[tuple[int, bytes | None, Copy]]:
        """Returns (block id, hash, state of the copy in lower tiers) for each block."""
        return [(i, block.block_hash, block.copy) for i, block in enumerate(self._blocks)]

    def _check_sets(self, expected: Counter[int], cached: set[int]) -> None:
        assert self.children.block_hashes() <= self._by_hash.keys(), "a child is gone"
        self._cached.check(cached)
        self.pins.check()
        for block_hash, block_id in self._by_hash.items():
            is_pinned = block_hash in self.pins
            assert self._blocks[block_id].is_pinned is is_pinned, f"the pin of {block_id}"
        unwritten = {i for i, b in enumerate(self._blocks) if b.block_hash and b.copy is Copy.NONE}
        assert self._unwritten.keys() == unwritten, "what has no copy is not what is to be written"
        deferred = self._deferred or ()
        states = [*self._free, *self._quarantined, *self._leaving, *deferred, *cached, *expected]
        states += self._scratch
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert len(states) == len(set(states)) == self.num_blocks, (
            f"free {self.num_free} + used {len(expected)} + cached {len(cached)} + quarantined "
            f"{self.num_quarantined} + leaving {self.num_leaving} + deferred {len(deferred)} is "
            f"not {self.num_blocks}, or a block is in two states"
        )


def _check_blocks(
    blocks: Sequence[Block], by_hash: Mapping[bytes, int], references: Counter[int]
) -> set[int]:
    """Returns the CACHED blocks. Raises AssertionError if the blocks are inconsistent.

    `references` is the number of tables that reference each block.
    """
    children: Counter[int] = Counter()
    cached = set()
    for block_id, block in enumerate(blocks):
        assert block.num_references == references[block_id], (
            f"block {block_id} has {block.num_references} references, but "
            f"{references[block_id]} tables name it"
        )
        if block.block_hash is None:
            assert block.num_references <= 1, f"block {block_id} is shared and has no hash"
            continue
        assert by_hash.get(block.block_hash) == block_id, (
            f"the hash of block {block_id} leads to {by_hash.get(block.block_hash)}"
        )
        if not block.num_references:
            cached.add(block_id)
        if block.parent_id is not None:
            children[block.parent_id] += 1
            parent = blocks[block.parent_id]
            assert parent.block_hash is not None, f"the parent of block {block_id} is gone"
            assert parent.num_references >= (block.num_references > 0), (
                f"block {block_id} is used, its parent {block.parent_id} is not"
            )
    hashed = sum(block.block_hash is not None for block in blocks)
    assert len(by_hash) == hashed, "a hash leads to a block that does not carry it"
    for block_id, block in enumerate(blocks):
        assert block.num_children == children[block_id], (
            f"block {block_id} counts {block.num_children} children of {children[block_id]}"
        )
    return cached
