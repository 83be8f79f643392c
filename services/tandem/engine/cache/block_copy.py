"""Describes block copies inside the KV pools, for a prompt that shares only a block's first tokens.

For example, a prompt shares 10 of the 16 tokens of a cached block. The engine copies the block, and
the sequence computes only the other 6 tokens of the copy.
"""

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """A copy of one block's KV into another block of the same KV group's pool."""

    source: int
    target: int
    group: int = 0


class BlockPart(NamedTuple):
    """The first `num_tokens` tokens of a block. A sequence gets their KV by a copy of the block.

    With state groups, `num_tokens` is 0, and the frozen states after the block before are
    copied."""

    num_tokens: int
    # The block to copy in each KV group, as an id in the group's pool; None: nothing is copied in
    # this group. Empty: nothing is copied.
    sources: tuple[int | None, ...]


NO_PART = BlockPart(0, ())
