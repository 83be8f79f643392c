"""A list of blocks in the memory of one process, of which an agent reads or writes the same part.

A tensor-parallel rank may need only some heads of the blocks of another rank. The heads are
contiguous bytes at the same place in each block:

    pool    | block 0                 | block 1                 | ...
                | num_bytes |             | num_bytes |
            <--->               offset of the pool's first part
                <--------------------->   stride

This module imports no other module of Tandem.
"""

from dataclasses import dataclass
from typing import NamedTuple


class BlockParts(NamedTuple):
    """The same part of each block of one KV group's pool. All sizes are in bytes."""

    offset: int  # from the address of the list to the part of the first block
    num_blocks: int
    stride: int  # from the part of one block to the part of the next one
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockList:
    """Parts of the blocks of all KV groups' pools. A block's number in the list is its id among all
    pools."""

    address: int
    device_id: int
    memory: str  # memory type, as NIXL names it: "DRAM" or "VRAM"
    pools: tuple[BlockParts, ...]
