"""The state of one block of a pool, and of its copy in a lower tier."""

from dataclasses import dataclass
from enum import Enum


class Copy(Enum):
    """The state of a hashed block's copy in a lower tier.

    A pool evicts leaves in the order of these values, but treats COMPLETE and LOST as equal. A tier
    that stores only recurring blocks has copies mainly of the blocks that the pool should keep too,
    so a copy must not make them go first.
    """

    # in a window, and no request is expected to resume after it (window_pool.py)
    UNWANTED = "unwanted"
    COMPLETE = "complete"
    # The tier evicted or refused it; it is not copied again before the block's next use.
    LOST = "lost"
    NONE = "none"
    WRITING = "writing"

    __hash__ = object.__hash__  # Enum's hash is a Python function, and pools look copies up often


@dataclass(slots=True)
class Block:
    num_references: int = 0
    block_hash: bytes | None = None
    # the parent of a hashed block; None if the parent is the chain's root
    parent_id: int | None = None
    num_children: int = 0  # number of hashed blocks whose parent is this block
    # set for a CACHED leaf by the pool's policy: leaves of the lowest worth are evicted first
    worth: float = 0.0
    # counts the pool's releases; among leaves of equal worth the oldest is evicted first
    last_used: int = 0
    copy: Copy = Copy.NONE
    is_pinned: bool = False  # evicted after all blocks that are not pinned (pins.py)
