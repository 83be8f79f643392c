"""The KV blocks of one group of layers: who holds them, and which hold a prefix worth keeping.

It knows block ids and hashes, no tensors and no sequences. A block is in one of four states:

    FREE --allocate--> USED --release--> FREE          no hash: nobody can find it again
      ^                 | store (full, final)
      |                 v
      |               USED, hashed --release--> CACHED (no reference, found by `match`)
      |                 ^------- reserve ---------'|
      '---------- evict or drop, leaf first -------'
    USED --quarantine--> QUARANTINED --unquarantine--> FREE     a read may still write it

Three things always hold; `check_integrity` looks at them:
- Whoever references a hashed block references its parents, so a CACHED block has no USED child, and
  evicting leaves only keeps every chain whole up to its root (prefix-closed).
- A hash names one block. A second block of the same content is never entered: its owner gets the
  first one instead (`store`).
- A hashed block is full and never written again; only its one owner writes a block without a hash.

A model with several KV groups has one pool a group.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.engine.cache.eviction import LeastRecentlyUsed
from tandem.engine.types import StoredBlock

_LISTED_PER_BLOCK_MAX = 16  # hot prefixes: bounds how often long shared prefixes are repeated


@dataclass(slots=True)
class _Block:
    num_references: int = 0
    block_hash: bytes | None = None
    parent_id: int | None = None  # of a hashed block; None: its parent is the chain's root
    num_children: int = 0  # hashed blocks whose parent this is
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    block_table: list[int]
    num_cached_blocks: int  # how many of the table's first blocks hold their KV already


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0  # unreferenced blocks that `match` still finds; each can be evicted
        self._policy = LeastRecentlyUsed()
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: lowest id first, warm ones next
        self._by_hash: dict[bytes, int] = {}
        self._quarantined: set[int] = set()
        self._clock = 0
        self._stored: dict[bytes, StoredBlock] = {}  # by hash, since the last `take_events`
        self._removed: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached - len(self._quarantined)

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
        """Returns the block with this content; None if there is none."""
        return self._by_hash.get(block_hash)

    def can_reserve(self, block_hashes: Iterable[bytes], num_blocks: int) -> bool:
        return self._fits(self.match(block_hashes), num_blocks)

    def reserve(self, block_hashes: Iterable[bytes], num_blocks: int) -> Reservation | None:
        """References what is cached of the chain and allocates the rest of `num_blocks`.

        None when there is no room for all of it; then nothing changed.
        """
        matched = self.match(block_hashes)
        if not self._fits(matched, num_blocks):
            return None
        for block_id in matched:
            self._reference(block_id)
        fresh = self.allocate(num_blocks - len(matched))
        assert fresh is not None
        return Reservation([*matched, *fresh], len(matched))

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one reference and no hash; None, and nothing changed, when too few remain."""
        if num_blocks > self.num_free + self.num_cached:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in taken:
            self._blocks[block_id].num_references = 1
        return taken

    def release(self, block_table: Sequence[int]) -> None:
        """Drops one reference on each block of a table (given in the order of the chain)."""
        self._clock += 1
        for block_id in reversed(block_table):
            self._drop_reference(block_id, self._clock)

    def drop_cached(self) -> int:
        """Frees every CACHED block, so that `match` finds USED ones only; returns how many."""
        num_dropped = self.num_cached
        while self.num_cached:
            self._free.append(self._evict())
        return num_dropped

    def store(
        self,
        block_id: int,
        *,
        parent_id: int | None,
        parent_hash: bytes,
        block_hash: bytes,
        token_ids: Sequence[int] = (),
        index: int = 0,
    ) -> int:
        """Lets a full block, final in memory, be found by its hash; parents come before children.

        Answers the block that holds this content from now on. When another one did already, the
        caller's reference moves to that one, and `block_id` is free. `token_ids` and the block's
        `index` in its chain only go into the event.
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
        self._by_hash[block_hash] = block_id
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = StoredBlock(parent_hash, block_hash, list(token_ids), index)
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
        return bool(self._stored or self._removed)

    def take_events(self) -> tuple[list[StoredBlock], list[bytes]]:
        """Returns net changes since last time: (stored, parents first; removed, children first).

        Net, because a consumer applies all that was stored before all that was removed.
        """
        stored = list(self._stored.values())
        removed = list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed

    def block_hashes(self, first: bytes, end: bytes) -> list[bytes]:
        """Hashes that `match` finds, from `first` on and before `end`; empty `end`: to the last."""
        return [h for h in self._by_hash if first <= h and (not end or h < end)]

    def hot_prefixes(self, blocks_max: int) -> list[list[bytes]]:
        """Hashes of the most lately used chains, each from its root on.

        At most `blocks_max` blocks, a prefix that chains share counted once; the last chain may be
        cut short.
        """
        leaves = [b for b in self._by_hash.values() if not self._blocks[b].num_children]
        leaves.sort(key=self._heat, reverse=True)
        chains: list[list[bytes]] = []
        taken: set[int] = set()  # prefix-closed
        num_listed = 0
        for leaf in leaves:
            room = blocks_max - len(taken)
            if room <= 0 or num_listed > _LISTED_PER_BLOCK_MAX * blocks_max:
                break
            chain = self._chain(leaf)
            num_shared = sum(block_id in taken for block_id in chain)
            chain = chain[: num_shared + room]
            taken.update(chain)
            num_listed += len(chain)
            chains.append([hash_ for b in chain if (hash_ := self._blocks[b].block_hash)])
        return chains

    def _heat(self, block_id: int) -> tuple[bool, int]:
        block = self._blocks[block_id]
        return block.num_references > 0, block.last_used

    def _chain(self, leaf: int) -> list[int]:
        """Block ids from the root to a hashed block."""
        chain = []
        block_id: int | None = leaf
        while block_id is not None:
            chain.append(block_id)
            block_id = self._blocks[block_id].parent_id
        return chain[::-1]

    def _fits(self, matched: list[int], num_blocks: int) -> bool:
        unreferenced = sum(not self._blocks[b].num_references for b in matched)
        room = self.num_free + self.num_cached - unreferenced
        return num_blocks - len(matched) <= room

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
        self.num_cached += 1
        if not block.num_children:
            self._policy.add(block_id, last_used)

    def _reference(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if not block.num_references:
            self.num_cached -= 1
            self._policy.discard(block_id)
        block.num_references += 1

    def _evict(self) -> int:
        block_id = self._policy.pop()
        block = self._blocks[block_id]
        assert block.block_hash is not None, f"block {block_id} is evicted and was not cached"
        del self._by_hash[block.block_hash]
        if block.block_hash in self._stored:
            del self._stored[block.block_hash]
        else:
            self._removed[block.block_hash] = None
        self.num_cached -= 1
        if block.parent_id is not None:
            parent = self._blocks[block.parent_id]
            parent.num_children -= 1
            if not parent.num_children and not parent.num_references:
                self._policy.add(block.parent_id, parent.last_used)
        block.block_hash = block.parent_id = None
        return block_id

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError naming what is wrong; `block_tables` are all that reference."""
        expected = Counter(block_id for table in block_tables for block_id in table)
        children: Counter[int] = Counter()
        cached = set()
        for block_id, block in enumerate(self._blocks):
            assert block.num_references == expected[block_id], (
                f"block {block_id} has {block.num_references} references, but "
                f"{expected[block_id]} tables name it"
            )
            if block.block_hash is None:
                assert block.num_references <= 1, f"block {block_id} is shared and has no hash"
                continue
            assert self._by_hash.get(block.block_hash) == block_id, (
                f"the hash of block {block_id} leads to {self._by_hash.get(block.block_hash)}"
            )
            if not block.num_references:
                cached.add(block_id)
            if block.parent_id is not None:
                children[block.parent_id] += 1
                parent = self._blocks[block.parent_id]
                assert parent.block_hash is not None, f"the parent of block {block_id} is gone"
                assert parent.num_references >= (block.num_references > 0), (
                    f"block {block_id} is used, its parent {block.parent_id} is not"
                )
        self._check_sets(expected, children, cached)

    def _check_sets(self, expected: Counter[int], children: Counter[int], cached: set[int]) -> None:
        hashed = sum(block.block_hash is not None for block in self._blocks)
        assert len(self._by_hash) == hashed, "a hash leads to a block that does not carry it"
        for block_id, block in enumerate(self._blocks):
            assert block.num_children == children[block_id], (
                f"block {block_id} counts {block.num_children} children of {children[block_id]}"
            )
        assert self.num_cached == len(cached), f"{self.num_cached} cached, found {len(cached)}"
        leaves = {b for b in cached if not self._blocks[b].num_children}
        assert self._policy.block_ids() == leaves, "what can be evicted is not the cached leaves"
        states = [*self._free, *self._quarantined, *cached, *expected]
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert len(states) == len(set(states)) == self.num_blocks, (
            f"free {self.num_free} + used {len(expected)} + cached {len(cached)} + quarantined "
            f"{self.num_quarantined} is not {self.num_blocks}, or a block is in two states"
        )
