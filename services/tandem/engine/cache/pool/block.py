"""The state of one block of a pool, and of its copy in a lower tier."""

from dataclasses import dataclass
from enum import Enum


class Copy(Enum):
    """The copy of a hashed block in a lower tier. A pool evicts leaves in this order, but those
    with a WHOLE and with a LOST copy together: a tier that keeps what returns has copies of the
    blocks that a pool should keep, too."""

    UNWANTED = "unwanted"  # of a window: no request is expected to go on from it (window_pool.py)
    WHOLE = "whole"
    LOST = "lost"  # evicted from the tier, or not taken: not written again before its next use
    NONE = "none"
    WRITING = "writing"

    __hash__ = object.__hash__  # Enum's own is a Python function, and pools look copies up often


@dataclass(slots=True)
class Block:
    num_references: int = 0
    block_hash: bytes | None = None
    parent_id: int | None = None  # of a hashed block; None: its parent is the chain's root
    num_children: int = 0  # hashed blocks whose parent this is
    worth: float = 0.0  # of a CACHED leaf, to the pool's policy: what is worth least is evicted
    last_used: int = 0  # by the pool's releases: of leaves that are worth the same the oldest goes
    copy: Copy = Copy.NONE
    is_pinned: bool = False  # evicted after all that are not (pins.py)
