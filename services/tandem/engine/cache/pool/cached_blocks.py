"""The CACHED blocks of a pool, and the order in which they are evicted."""

from collections.abc import Collection

from tandem.engine.cache.pool.block import Block, Copy
from tandem.engine.cache.pool.eviction import EvictionQueue


class CachedBlocks:
    """Counts the hashed blocks without references. Blocks without hashed children (leaves) are in
    queues, in the order of eviction."""

    def __init__(self, blocks: list[Block], *, by_use: bool = False) -> None:
        """`blocks` are all blocks of the pool, by id. With `by_use`, the order of eviction does not
        depend on the blocks' copies, except that blocks that are being copied come last."""
        self._blocks = blocks
        self._num = dict.fromkeys(Copy, 0)
        # Two sets of queues: for leaves that are not pinned, and for pinned leaves.
        self._leaves = (_queues(by_use), _queues(by_use))

    def __len__(self) -> int:
        return sum(self._num.values())

    def num(self, copy: Copy) -> int:
        """Returns the number of blocks whose copy in lower tiers has the state `copy`."""
        return self._num[copy]

    def add(self, block_id: int) -> None:
        """Adds a hashed block that has no references any more."""
        block = self._blocks[block_id]
        self._num[block.copy] += 1
        if not block.num_children:
            self._queue(block).add(block_id, (block.worth, block.last_used))

    def discard(self, block_id: int) -> None:
        """Removes a block. The block's `copy` and `is_pinned` must not have changed since it was
        added."""
        block = self._blocks[block_id]
        self._num[block.copy] -= 1
        if not block.num_children:
            self._queue(block).discard(block_id)

    def update(self, block_id: int) -> None:
        """Moves a block to its new place in the order of eviction. Must be called when its number
        of children, its last use or its worth has changed. Ignores referenced blocks."""
        block = self._blocks[block_id]
        leaves = self._queue(block)
        leaves.discard(block_id)
        if self._is_leaf(block):
            leaves.add(block_id, (block.worth, block.last_used))

    def oldest(self, copy: Copy) -> int | None:
        """Returns the leaf that is evicted first among the leaves whose copy in lower tiers is in
        the state `copy`. Returns None if there is none."""
        return next((leaves[copy].oldest() for leaves in self._leaves if leaves[copy]), None)

    @property
    def has_unpinned(self) -> bool:
        """True if a leaf that is not pinned, and that no tier copies, can be evicted."""
        queues = self._leaves[False]
        return any(leaves for copy, leaves in queues.items() if copy is not Copy.WRITING)

    def pop(self) -> int:
        """Removes and returns the leaf that is evicted first. Raises StopIteration if there is no
        leaf."""
        leaves = next(leaves for half in self._leaves for leaves in half.values() if leaves)
        block_id = leaves.pop()
        self._num[self._blocks[block_id].copy] -= 1
        return block_id

    def check(self, expected: Collection[int]) -> None:
        """Raises AssertionError if `expected` are not the cached blocks."""
        assert len(self) == len(expected), f"{len(self)} cached, found {len(expected)}"
        for copy in Copy:
            found = {b for b in expected if self._blocks[b].copy is copy}
            assert self._num[copy] == len(found), f"{len(found)} are {copy.value}"
        for half in self._leaves:
            for leaves in half.values():
                found = {b for b in expected if self._is_leaf(self._blocks[b])}
                found = {b for b in found if self._queue(self._blocks[b]) is leaves}
                assert leaves.block_ids() == found, "what can be evicted is not the leaves"

    def _queue(self, block: Block) -> EvictionQueue[int]:
        return self._leaves[block.is_pinned][block.copy]

    def _is_leaf(self, block: Block) -> bool:
        return not block.num_references and not block.num_children


def _queues(by_use: bool) -> dict[Copy, EvictionQueue[int]]:
    """Returns a queue of leaves for each state of a block's copy, in the order of eviction.
    COMPLETE and LOST share a queue. With `by_use`, all but WRITING do."""
    queues = {copy: EvictionQueue[int]() for copy in Copy}
    queues[Copy.LOST] = queues[Copy.COMPLETE]
    if by_use:
        return {copy: queues[copy if copy is Copy.WRITING else Copy.UNWANTED] for copy in Copy}
    return queues
