"""Copies of blocks inside the pools, for sequences whose tokens diverge within a block."""

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """A copy of one block's KV into another block of the same KV group's pool."""

    source: int
    target: int
    group: int = 0


class BlockPart(NamedTuple):
    """The first tokens of a block, whose KV a sequence gets by a copy of the block."""

    num_tokens: int
    # One source block per KV group, by its id in the pool; empty: nothing is copied.
    sources: tuple[int, ...]


NO_PART = BlockPart(0, ())
