"""The state of one block of a pool, and of its copy in a lower tier."""

from dataclasses import dataclass
from enum import Enum


class Copy(Enum):
    """The state of a hashed block's copy in a lower tier.

    A pool evicts leaves in the order of these values, but treats COMPLETE and LOST as equal. A tier
    may accept only blocks that recur, which the pool should keep too. So a block with a copy must
    not be evicted before a block whose copy was refused.
    """

    # No copy. The block is in a window's pool, and no request is expected to need it
    # (window_pool.py).
    UNWANTED = "unwanted"
    COMPLETE = "complete"  # a tier has a readable copy
    # No copy, because tiers evicted or refused it. The block's next use offers it to tiers again.
    LOST = "lost"
    NONE = "none"  # no copy yet; the block is to be offered to tiers
    WRITING = "writing"  # a tier is copying the block

    __hash__ = object.__hash__  # Enum's hash is a Python function, and pools look copies up often


@dataclass(slots=True)
class Block:
    num_references: int = 0
    block_hash: bytes | None = None
    # Parent of a hashed block. None for the first block of a chain, and in a window's pool.
    parent_id: int | None = None
    num_children: int = 0  # number of hashed blocks whose parent is this block
    # Set by the policy of a tier's slots (slot_pool.py). Leaves of the lowest worth are evicted
    # first.
    worth: float = 0.0
    # Time of the last release, as a count of the pool's releases. Among leaves of equal worth, the
    # one with the lowest value is evicted first.
    last_used: int = 0
    copy: Copy = Copy.NONE
    is_pinned: bool = False  # True: evicted after all blocks that are not pinned (pins.py)
