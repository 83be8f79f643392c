"""Copies of blocks inside the pools: sequences that part within a block share what is before."""

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Two blocks of a KV group's pool: the KV of one block is copied into the other."""

    source: int
    target: int
    group: int = 0


class BlockPart(NamedTuple):
    """The first tokens of a block, which a sequence can have by a copy."""

    num_tokens: int
    sources: tuple[int, ...]  # the block in the pool of each KV group; none: nothing is copied


NO_PART = BlockPart(0, ())
