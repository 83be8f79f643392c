"""The CACHED blocks of a pool by their copies, and among them the leaves, which can be evicted."""

from collections.abc import Collection

from tandem.engine.cache.block import Block, Copy
from tandem.engine.cache.eviction import EvictionQueue


class CachedBlocks:
    """Counts blocks that nobody references and that have a hash, and orders their leaves."""

    def __init__(self, blocks: list[Block]) -> None:
        """`blocks` are those of the pool, by their ids."""
        self._blocks = blocks
        self._num = dict.fromkeys(Copy, 0)
        # Those that are not pinned, and those that are.
        self._leaves: tuple[dict[Copy, EvictionQueue[int]], ...] = tuple(
            {copy: EvictionQueue[int]() for copy in Copy} for _ in range(2)
        )

    def __len__(self) -> int:
        return sum(self._num.values())

    def num(self, copy: Copy) -> int:
        """Returns how many blocks have such a copy."""
        return self._num[copy]

    def add(self, block_id: int) -> None:
        """The last reference of a hashed block is gone."""
        block = self._blocks[block_id]
        self._num[block.copy] += 1
        self.update(block_id)

    def discard(self, block_id: int) -> None:
        """A cached block is referenced again, or evicted; it has its copy and its pin still."""
        block = self._blocks[block_id]
        self._num[block.copy] -= 1
        self._leaves[block.is_pinned][block.copy].discard(block_id)

    def update(self, block_id: int) -> None:
        """A block got its first child, lost its last one, was used or is worth more; ignores
        referenced ones."""
        block = self._blocks[block_id]
        leaves = self._leaves[block.is_pinned][block.copy]
        leaves.discard(block_id)
        if not block.num_references and not block.num_children:
            leaves.add(block_id, (block.worth, block.last_used))

    def oldest(self, copy: Copy) -> int | None:
        """Returns the leaf with such a copy that is evicted first."""
        return next((leaves[copy].oldest() for leaves in self._leaves if leaves[copy]), None)

    def pop(self) -> int:
        """Takes out the leaf that is evicted first of all. Raises StopIteration if there is
        none."""
        copy, leaves = next(
            (copy, leaves) for half in self._leaves for copy, leaves in half.items() if leaves
        )
        self._num[copy] -= 1
        return leaves.pop()

    def check(self, expected: Collection[int]) -> None:
        """Raises AssertionError if these are not the cached blocks."""
        assert len(self) == len(expected), f"{len(self)} cached, found {len(expected)}"
        for copy in Copy:
            found = {b for b in expected if self._blocks[b].copy is copy}
            assert self._num[copy] == len(found), f"{len(found)} are {copy.value}"
            leaves = {b for b in found if not self._blocks[b].num_children}
            for is_pinned in (False, True):
                expected_leaves = {b for b in leaves if self._blocks[b].is_pinned is is_pinned}
                assert self._leaves[is_pinned][copy].block_ids() == expected_leaves, (
                    f"what can be evicted of {copy.value} is not the cached leaves"
                )
