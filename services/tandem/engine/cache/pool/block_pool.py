"""The KV blocks of one group of layers: who holds them, and which hold a prefix worth keeping.

It knows block ids and hashes, no tensors and no sequences. A block is in one of five states:

    FREE --allocate--> USED --release--> FREE          no hash: nobody can find it again
      ^                 | store (full, final)
      |                 v
      |               USED, hashed --release--> CACHED (no reference, found by `match`)
      |                 ^------- reserve ---------'|
      '---------- evict or drop, leaf first -------'
    USED --quarantine--> QUARANTINED --unquarantine--> FREE     a read may still write it
    CACHED --evict while it is written to a tier--> LEAVING --end_write--> FREE

A hashed block never changes, so a tier (engine/tiers) may write its copy meanwhile. `allocate`
takes FREE blocks, then CACHED leaves for which no write is due, then others, then pinned ones
(pins.py), and waits for no write.

Three things always hold; `check_integrity` looks at them:
- Whoever references a hashed block references its parents, so a CACHED block has no USED child, and
  evicting leaves only keeps every chain whole up to its root (prefix-closed).
- A hash names one block. A second block of the same content is never entered: its owner gets the
  first one instead (`store`).
- A hashed block is full and never written again; only its one owner writes a block without a hash.

A prompt that leaves a cached chain inside a block takes the beginning of that block by a copy: see
`children`, and `source` of `reserve`.
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
    num_cached_blocks: int  # how many of the table's first blocks hold their KV already


class BlockPool:
    def __init__(self, num_blocks: int, *, report_tokens: bool = False) -> None:
        """`report_tokens`: the events of stored blocks have their token ids."""
        self.num_blocks = num_blocks
        self.children = ChildBlocks()  # of the blocks that were stored with their tokens
        self.num_dropped = 0  # CACHED blocks that were evicted without a copy
        self.pins = Pins(0)
        self._blocks = [Block() for _ in range(num_blocks)]
        self._cached = CachedBlocks(self._blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: lowest id first, warm ones next
        self._by_hash: dict[bytes, int] = {}
        self._quarantined: set[int] = set()
        self._leaving: set[int] = set()
        self._unwritten: dict[int, None] = {}  # hashed, Copy.NONE: as they were stored, or used
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
        """Unreferenced blocks that `match` still finds."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self.num_free + self.num_cached - self._cached.num(Copy.WRITING)

    @property
    def num_used(self) -> int:
        others = self.num_free + self.num_cached + self.num_quarantined + self.num_leaving
        return self.num_blocks - others

    def match(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Block ids of the longest prefix of the chain that is here. References nothing."""
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
        """References what is cached of the chain and allocates the rest of `num_blocks`.

        It references `source`, too, if there is one: a block that is to be copied, and released
        then. None when there is no room for all of it; then nothing changed.
        """
        matched = self.match(block_hashes)
        if not self._fits(matched, num_blocks, source):
            return None
        for block_id in matched if source is None else [*matched, source]:
            self._reference(block_id)
        fresh = self.allocate(num_blocks - len(matched))
        assert fresh is not None
        return Reservation([*matched, *fresh], len(matched))

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one reference and no hash; None, and nothing changed, when too few remain."""
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
        """Drops one reference on each block of a table (given in the order of the chain)."""
        self._clock += 1
        for block_id in reversed(block_table):
            self._drop_reference(block_id, self._clock)

    def pin(self, tenant: bytes, weight: int, chain: Sequence[bytes], until: float) -> int:
        """Has blocks evicted after all others, as `Pins.pin` says, also those that come later."""
        num_pinned = self.pins.pin(tenant, weight, chain, until)
        self._follow_pins()
        return num_pinned

    def expire_pins(self, now: float) -> None:
        """Ends the pins whose time is over."""
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
        """Frees every CACHED block, so that `match` finds USED ones only; returns how many."""
        num_dropped = self.num_cached
        while self.num_cached:
            self._evict()
        return num_dropped

    @property
    def has_unwritten(self) -> bool:
        """True if a hashed block has no copy, and tiers were not asked since its last use."""
        return bool(self._unwritten)

    @property
    def next_unwritten(self) -> int | None:
        """The first of those blocks; parents come before children, also if they were used later."""
        block_id = next(iter(self._unwritten), None)
        while block_id is not None and self._blocks[block_id].parent_id in self._unwritten:
            block_id = self._blocks[block_id].parent_id
        return block_id

    def names_of(self, block_id: int) -> tuple[bytes, bytes]:
        """Returns the hashes of a hashed block and of its parent; empty if it has no parent."""
        block = self._blocks[block_id]
        parent = None if block.parent_id is None else self._blocks[block.parent_id]
        assert block.block_hash is not None, f"block {block_id} has no hash"
        return block.block_hash, (parent and parent.block_hash) or b""

    def start_write(self, block_id: int) -> None:
        """A lower tier writes its copy of the block from now on: nobody else gets the block."""
        self._set_copy(block_id, Copy.WRITING)

    def end_write(self, block_id: int, *, is_whole: bool) -> None:
        """The lower tier reads the block no more."""
        if block_id in self._leaving:
            self._leaving.remove(block_id)
            self._blocks[block_id].copy = Copy.NONE
            self._free.append(block_id)
        else:
            self._set_copy(block_id, Copy.WHOLE if is_whole else Copy.LOST)

    def lose_copy(self, block_hash: bytes) -> None:
        """No lower tier has this content any more."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None and self._blocks[block_id].copy is Copy.WHOLE:
            self._set_copy(block_id, Copy.LOST)

    def renew_copy(self, block_hash: bytes) -> None:
        """Lower tiers cannot read their copies any more: if the block is here, they get others."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None and self._blocks[block_id].copy is Copy.WHOLE:
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
        """Lets a full block, final in memory, be found by its hash; parents come before children.

        Answers the block that holds this content from now on. When another one did already, the
        caller's reference moves to that one, and `block_id` is free. With `token_ids` its beginning
        can be found. The block's `index` in its chain and its `adapter` only go into the event.
        """
        block = self._blocks[block_id]
        assert block.num_references == 1, f"block {block_id} is shared before it was stored"
        assert block.block_hash is None, f"block {block_id} is stored twice"
        twin = self._by_hash.get(block_hash)
        if twin is not None:
            self._reference(twin)
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
        """Returns whether the one owner of the block may still write it."""
        block = self._blocks[block_id]
        return block.num_references == 1 and block.block_hash is None

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Takes blocks from their owner and gives them to nobody until `unquarantine`."""
        for block_id in block_ids:
            assert self.is_writable(block_id), f"block {block_id} is shared, and a read writes it"
            self._blocks[block_id].num_references = 0
            self._quarantined.add(block_id)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """Frees quarantined blocks, which no read writes any more; ignores other blocks."""
        for block_id in block_ids:
            if block_id in self._quarantined:
                self._quarantined.remove(block_id)
                self._free.append(block_id)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns net changes since last time: (stored, parents first; removed, children first)."""
        return self._events.take()

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Hashes that `match` finds, from `first` on and before `end`; empty `end`: to the last."""
        return [h for h in self._by_hash if first <= h and (not end or h < end)]

    def leaves(self) -> list[int]:
        """Returns hashed blocks without children, the most lately used first."""
        blocks = self._blocks
        leaves = [b for b in self._by_hash.values() if not blocks[b].num_children]
        leaves.sort(key=lambda b: (blocks[b].num_references > 0, blocks[b].last_used), reverse=True)
        return leaves

    def chain(self, leaf: int) -> list[int]:
        """Returns block ids from the root to a hashed block."""
        chain = []
        block_id: int | None = leaf
        while block_id is not None:
            chain.append(block_id)
            block_id = self._blocks[block_id].parent_id
        return chain[::-1]

    def _fits(self, matched: list[int], num_blocks: int, source: int | None) -> bool:
        kept = matched if source is None else [*matched, source]
        blocks = (self._blocks[block_id] for block_id in kept)
        unreferenced = sum(
            not block.num_references and block.copy is not Copy.WRITING for block in blocks
        )
        return num_blocks - len(matched) <= self.num_available - unreferenced

    def _drop_reference(self, block_id: int, last_used: int) -> None:
        block = self._blocks[block_id]
        assert block.num_references > 0, f"block {block_id} is released once too often"
        block.num_references -= 1
        if block.num_references:
            return
        if block.block_hash is None:
            self._free.append(block_id)
            return
        block.last_used = last_used
        self._cached.add(block_id)

    def _reference(self, block_id: int) -> None:
        block = self._blocks[block_id]
        is_cached = not block.num_references
        if is_cached:
            self._cached.discard(block_id)
        # A tier may take it at this use, also while others use it, as they do a system prompt.
        if block.copy is Copy.LOST or (is_cached and block.copy is Copy.UNWANTED):
            block.copy = Copy.NONE
            self._unwritten[block_id] = None
        block.num_references += 1

    def _evict(self) -> Copy:
        """Frees a CACHED leaf; one that is being written is LEAVING instead. Returns its copy."""
        block_id = self._cached.pop()
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
        """Raises AssertionError naming what is wrong; `block_tables` are all that reference."""
        expected = Counter(block_id for table in block_tables for block_id in table)
        cached = _check_blocks(self._blocks, self._by_hash, expected)
        self._check_sets(expected, cached)

    def copies(self) -> list[tuple[int, bytes | None, Copy]]:
        """Returns each block with its hash and its copy."""
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
        states = [*self._free, *self._quarantined, *self._leaving, *cached, *expected]
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert len(states) == len(set(states)) == self.num_blocks, (
            f"free {self.num_free} + used {len(expected)} + cached {len(cached)} + quarantined "
            f"{self.num_quarantined} + leaving {self.num_leaving} is not {self.num_blocks}, or a "
            "block is in two states"
        )


def _check_blocks(
    blocks: Sequence[Block], by_hash: Mapping[bytes, int], references: Counter[int]
) -> set[int]:
    """Returns the blocks that are CACHED. Raises AssertionError naming what is wrong.

    `references` are those of all tables, by block.
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
