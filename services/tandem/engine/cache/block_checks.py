"""Checks the blocks of a pool against each other: references, hashes and parents."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.engine.cache.block import Block


def check_blocks(
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
