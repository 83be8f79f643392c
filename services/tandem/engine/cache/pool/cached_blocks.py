"""The CACHED blocks of a pool by their copies, and among them the leaves, which can be evicted."""

from collections.abc import Collection

from tandem.engine.cache.pool.block import Block, Copy
from tandem.engine.cache.pool.eviction import EvictionQueue


class CachedBlocks:
    """Counts blocks that nobody references and that have a hash, and orders their leaves."""

    def __init__(self, blocks: list[Block]) -> None:
        """`blocks` are those of the pool, by their ids."""
        self._blocks = blocks
        self._num = dict.fromkeys(Copy, 0)
        # Those that are not pinned, and those that are.
        self._leaves = (_queues(), _queues())

    def __len__(self) -> int:
        return sum(self._num.values())

    def num(self, copy: Copy) -> int:
        """Returns how many blocks have such a copy."""
        return self._num[copy]

    def add(self, block_id: int) -> None:
        """Adds a hashed block whose last reference is gone."""
        block = self._blocks[block_id]
        self._num[block.copy] += 1
        if not block.num_children:
            self._queue(block).add(block_id, (block.worth, block.last_used))

    def discard(self, block_id: int) -> None:
        """Removes a block that is referenced again or evicted. It still has its copy and pin."""
        block = self._blocks[block_id]
        self._num[block.copy] -= 1
        if not block.num_children:
            self._queue(block).discard(block_id)

    def update(self, block_id: int) -> None:
        """Puts a block in its new place after it got its first child, lost its last one, was used
        or gained worth. Ignores referenced blocks."""
        block = self._blocks[block_id]
        leaves = self._queue(block)
        leaves.discard(block_id)
        if self._is_leaf(block):
            leaves.add(block_id, (block.worth, block.last_used))

    def oldest(self, copy: Copy) -> int | None:
        """Returns the leaf with such a copy that is evicted first."""
        return next((leaves[copy].oldest() for leaves in self._leaves if leaves[copy]), None)

    def pop(self) -> int:
        """Takes out the leaf that is evicted first of all. Raises StopIteration if there is
        none."""
        leaves = next(leaves for half in self._leaves for leaves in half.values() if leaves)
        block_id = leaves.pop()
        self._num[self._blocks[block_id].copy] -= 1
        return block_id

    def check(self, expected: Collection[int]) -> None:
        """Raises AssertionError if these are not the cached blocks."""
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


def _queues() -> dict[Copy, EvictionQueue[int]]:
    """Returns the leaves by their copies, those first that are evicted first."""
    queues = {copy: EvictionQueue[int]() for copy in Copy}
    queues[Copy.LOST] = queues[Copy.WHOLE]
    return queues
