"""A list of blocks in the memory of one process, of which an agent reads or writes the same part.

A tensor-parallel rank may need only some heads of the blocks of another rank. The heads are
contiguous bytes at the same place in each block:

    pool    | block 0                 | block 1                 | ...
                | num_bytes |             | num_bytes |
            <--->               offset of the pool's first part
                <--------------------->   stride

A slot of states is read in pieces, each of which has a number in the list. The pieces of one part
of a slot are contiguous, too:

    pool    | slot 0                  | slot 1                  | ...
                | 0 | 1 | 2 |             | 3 | 4 | 5 |           num_pieces = 3

This module imports no other module of Tandem.
"""

from dataclasses import dataclass
from typing import NamedTuple


class BlockParts(NamedTuple):
    """The same part of each block of one KV group's pool. All sizes are in bytes."""

    offset: int  # from the address of the list to the part of the first block
    num_blocks: int  # in a pool of slots, the number of pieces of all slots
    stride: int  # from the part of one block or slot to the part of the next one
    num_bytes: int  # of a block's part, or of a piece of a slot's part
    num_pieces: int = 1  # of a slot

    def runs(self) -> list[tuple[int, int, int]]:
        """Returns runs of parts at equal distances, (offset, stride, number) each, in the order of
        their numbers."""
        if self.num_pieces == 1 or self.num_pieces * self.num_bytes == self.stride:
            return [(self.offset, self.stride // self.num_pieces, self.num_blocks)]
        return [
            (self.offset + slot * self.stride, self.num_bytes, self.num_pieces)
            for slot in range(self.num_blocks // self.num_pieces)
        ]


@dataclass(frozen=True, slots=True)
class BlockList:
    """Parts of the blocks of all KV groups' pools. A block's number in the list is its id among all
    pools."""

    address: int
    device_id: int
    memory: str  # memory type, as NIXL names it: "DRAM" or "VRAM"
    pools: tuple[BlockParts, ...]
