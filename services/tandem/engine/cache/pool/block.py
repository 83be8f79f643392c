"""The state of one block of a KV pool, and the state of its copy in a tier."""

from dataclasses import dataclass
from enum import Enum


class Copy(Enum):
    """The state of a hashed block's copy in lower tiers.

    A pool evicts blocks in the order of these values: UNWANTED first, WRITING last. COMPLETE and
    LOST count as equal. Otherwise blocks with a copy would be evicted before blocks whose copy the
    tiers refused. Tiers may accept only blocks that recur, so the pool would lose those first.
    """

    # No copy. The block is in a window's pool, and no request is expected to need a copy
    # (window_pool.py).
    UNWANTED = "unwanted"
    COMPLETE = "complete"  # a tier has a readable copy
    # No copy, because tiers evicted or refused it. At its next use the block is offered to them
    # again.
    LOST = "lost"
    NONE = "none"  # no copy yet; the block waits to be offered to tiers
    WRITING = "writing"  # a tier is copying the block

    # faster than Enum's hash, a Python function; pools look up copies often
    __hash__ = object.__hash__


@dataclass(slots=True)
class Block:
    num_references: int = 0
    block_hash: bytes | None = None
    # Id of the previous block in the chain of a hashed block. None for the first block of a chain,
    # and in a window's pool.
    parent_id: int | None = None
    num_children: int = 0  # number of hashed blocks whose parent is this block
    # Only set in a pool of tier slots, by the tier's policy (slot_pool.py). Leaves of the lowest
    # worth are evicted first.
    worth: float = 0.0
    # Number of `release` calls of the pool when this block was last released. Among leaves of equal
    # worth, the one with the lowest number is evicted first.
    last_used: int = 0
    copy: Copy = Copy.NONE
    is_pinned: bool = False  # True: evicted after all blocks that are not pinned (pins.py)
