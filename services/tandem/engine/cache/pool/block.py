"""The state of one block of a KV pool, and the state of its copy in a tier."""

from dataclasses import dataclass
from enum import Enum


class Copy(Enum):
    """The state of a hashed block's copy in lower tiers.

    A pool evicts blocks in the order of these values: UNWANTED first, WRITING last. COMPLETE and
    LOST count as equal. Tiers may accept only blocks that are used often, whose copies become
    COMPLETE, and refuse the others, whose copies are LOST. If COMPLETE came before LOST, the pool
    would evict frequently used blocks before rarely used ones.
    """

    # No copy. The block is in a window's pool, and no request is expected to need a copy of it
    # (window_pool.py).
    UNWANTED = "unwanted"
    COMPLETE = "complete"  # a tier has a readable copy
    # No copy, because tiers evicted or refused it. When the block is used again, the pool offers it
    # to tiers again.
    LOST = "lost"
    NONE = "none"  # no copy yet; the block waits to be offered to tiers
    WRITING = "writing"  # a tier is copying the block

    # This hash is faster than Enum's hash, which is a Python function. Pools look up copies often.
    __hash__ = object.__hash__


@dataclass(slots=True)
class Block:
    num_references: int = 0
    block_hash: bytes | None = None
    # Id of the previous block in the chain. None: the block has no hash, is the first of its chain,
    # or is in a window's pool.
    parent_id: int | None = None
    num_children: int = 0  # number of hashed blocks whose parent is this block
    # Only set in a pool of tier slots, by the tier's policy (slot_pool.py). Leaves of the lowest
    # worth are evicted first.
    worth: float = 0.0
    # The pool counts its `release` calls. This is the count at the last release of this block.
    # Among leaves of equal worth, the one with the lowest count is evicted first.
    last_used: int = 0
    copy: Copy = Copy.NONE
    is_pinned: bool = False  # True: evicted after all blocks that are not pinned (pins.py)
