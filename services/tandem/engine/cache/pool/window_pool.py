"""The pool of a KV group with a sliding window. Its blocks are cached without links to their
parents, so any block that no sequence references may be evicted, not only a leaf.

Blocks that left their sequence's window are evicted first. Then come the least recently used
blocks. Of one sequence's blocks, those with the smallest index are evicted first, because a later
request most likely resumes after the last blocks.

Most blocks soon leave the window, so tiers copy a block only if a request is expected to need it.
The block's `copy` changes as follows:

    stored --> UNWANTED --want_copies, or another sequence reuses it--> NONE --> copied
"""

from collections.abc import Iterable, Sequence

from tandem.common.adapter import Adapter
from tandem.engine.cache.pool.block import Copy
from tandem.engine.cache.pool.block_pool import BlockPool
from tandem.engine.cache.pool.cached_blocks import CachedBlocks

# Subtracted from `last_used` of each block that left its sequence's window. So these blocks are
# evicted before all blocks that a sequence held until the sequence ended.
_PASSED = 1 << 62


class WindowPool(BlockPool):
    def __init__(self, num_blocks: int, *, report_tokens: bool = False) -> None:
        super().__init__(num_blocks, report_tokens=report_tokens)
        # For each hashed block, by id: the hash of the previous block in its chain, or an empty
        # hash for the first block.
        self._parent_hashes: dict[int, bytes] = {}

    def release(self, block_table: Sequence[int]) -> None:
        """Drops one reference on each block of a table. The blocks must be in the order of the
        chain."""
        self._release_in_order(block_table, 0)

    def release_out_of_window(self, block_ids: Sequence[int]) -> None:
        """Drops one reference on each of these blocks, which left the window of their sequence.
        They are evicted in this order, before other blocks."""
        self._release_in_order(block_ids, -_PASSED)

    def evict_first(self, block_hash: bytes) -> None:
        """Makes a block the first to be evicted, as `release_out_of_window` does, if the block is
        CACHED."""
        block_id = self.find(block_hash)
        if block_id is not None and not self._blocks[block_id].num_references:
            self._blocks[block_id].last_used = self._clock - _PASSED
            self._cached.update(block_id)

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
        """Caches a full block as `BlockPool.store` does. Tiers do not copy it before `want_copies`,
        or before another sequence reuses it."""
        stored = super().store(
            block_id,
            parent_id=parent_id,
            parent_hash=parent_hash,
            block_hash=block_hash,
            token_ids=token_ids,
            index=index,
            adapter=adapter,
        )
        if stored == block_id:
            self._parent_hashes[block_id] = parent_hash if index else b""
            self._set_copy(block_id, Copy.UNWANTED)
        return stored

    def want_copies(self, block_hashes: Iterable[bytes]) -> None:
        """Lets tiers copy these blocks, because a request may need them. Ignores hashes that are
        not in the pool."""
        for block_hash in block_hashes:
            block_id = self.find(block_hash)
            if block_id is not None and self._blocks[block_id].copy is Copy.UNWANTED:
                self._set_copy(block_id, Copy.NONE)
                self._unwritten[block_id] = None

    def hashes_of(self, block_id: int) -> tuple[bytes, bytes]:
        """Returns the hash of a hashed block and the hash of its parent, which is empty for the
        first block of a chain."""
        block_hash, _ = super().hashes_of(block_id)
        return block_hash, self._parent_hashes[block_id]

    def can_reserve_any(self, block_hashes: Sequence[bytes], num_blocks: int) -> bool:
        """Returns whether `reserve_any` would find room."""
        return self._fits(self._find_any(block_hashes), num_blocks, None)

    def reserve_any(self, block_hashes: Sequence[bytes], num_blocks: int) -> list[int] | None:
        """Returns a table of `num_blocks` blocks that starts with the blocks of `block_hashes`.

        Blocks that are cached are referenced, even if blocks before them are not cached. All other
        blocks are newly allocated. Returns None, and changes nothing, if there is not enough room.
        """
        cached = self._find_any(block_hashes)
        if not self._fits(cached, num_blocks, None):
            return None
        self._reference(cached)
        fresh = self.allocate(num_blocks - len(cached))
        assert fresh is not None
        rest = iter(fresh)
        table = [self._by_hash.get(block_hash) for block_hash in block_hashes]
        table += [None] * (num_blocks - len(table))
        return [next(rest) if block_id is None else block_id for block_id in table]

    def _find_any(self, block_hashes: Sequence[bytes]) -> list[int]:
        found = (self.find(block_hash) for block_hash in block_hashes)
        return [block_id for block_id in found if block_id is not None]

    def _release_in_order(self, block_ids: Sequence[int], offset: int) -> None:
        for block_id in block_ids:
            self._clock += 1
            self._drop_references((block_id,), offset + self._clock)


class FrozenStatePool(WindowPool):
    """The pool of a state group. States are evicted in the order of their last use, whether tiers
    have copies of them or not: a state that is not wanted in tiers yet may be the one after which a
    running sequence restarts.

    Some slots are *scratch slots*: a step that verifies proposed tokens of a sequence computes on a
    copy of its running state. If all proposed tokens are accepted, the two slots are exchanged:

        running state   slot 3 --copy--> slot 8           slot 3: after token 40
        step computes tokens 41 to 44 on slot 8
        all accepted    slot 8 is the running state, and slot 3 a scratch slot
        otherwise       slot 3 stays the running state, and slot 8 a scratch slot
    """

    def __init__(self, num_blocks: int, *, report_tokens: bool = False) -> None:
        super().__init__(num_blocks, report_tokens=report_tokens)
        self._cached = CachedBlocks(self._blocks, by_use=True)
        self._num_scratch = 0

    def reserve_scratch(self, num_slots: int) -> None:
        """Makes so many slots of a new pool scratch slots."""
        self._scratch = [self._free.pop(0) for _ in range(num_slots)]
        self._num_scratch = num_slots

    @property
    def num_used(self) -> int:
        return super().num_used - self._num_scratch

    @property
    def num_scratch(self) -> int:
        """Number of scratch slots that no step uses."""
        return len(self._scratch)

    def take_scratch(self) -> int:
        """Returns a scratch slot, for one step. There must be one."""
        return self._scratch.pop()

    def return_scratch(self, slot: int) -> None:
        """Ends the use of a scratch slot."""
        self._scratch.append(slot)

    def exchange_scratch(self, slot: int, running: int) -> None:
        """Makes a scratch slot the running state of the sequence that has `running`, which becomes
        a scratch slot."""
        assert self.is_writable(running), f"slot {running} is not a running state"
        self._blocks[running].num_references = 0
        self._blocks[slot].num_references = 1
        self._scratch.append(running)

    def may_take(self, block_id: int) -> bool:
        """Returns whether `take` may be called: the state is CACHED and not pinned, and no tier
        copies it."""
        block = self._blocks[block_id]
        return not (block.num_references or block.is_pinned or block.copy is Copy.WRITING)

    def take(self, block_id: int) -> list[int]:
        """Makes a CACHED state the running state of a sequence, which will change it. So it is not
        cached any more. Returns the block table of the sequence."""
        self._cached.discard(block_id)
        self._drop_hash(block_id)
        table = self.allocate(1)
        assert table == [block_id], "the block that is freed last is not allocated first"
        return table

    def allocate_for_copy(self) -> int | None:
        """Returns a slot with one reference, into which a state is frozen. None: there is none
        without the eviction of a pinned state."""
        if not self._free and not self._cached.has_unpinned:
            return None
        table = self.allocate(1)
        return None if table is None else table[0]

    def last_depth(self, block_hashes: Sequence[bytes]) -> int:
        """Returns the largest number of leading blocks of a chain after which a state is cached; 0
        if there is none."""
        depths = range(len(block_hashes), 0, -1)
        return next((d for d in depths if block_hashes[d - 1] in self._by_hash), 0)
