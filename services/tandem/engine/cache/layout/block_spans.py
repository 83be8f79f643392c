"""The bytes of blocks by their ids: pools of equal blocks, one after the other in one memory.

Both processes of a worker and its transports find blocks by it. It stands on nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSpans:
    """The places of blocks in memory. Ids go on from pool to pool, as in kv_groups.py."""

    pools: tuple[tuple[int, int], ...]  # the number of blocks, and the bytes of each

    @classmethod
    def equal(cls, block_bytes: int, num_blocks: int) -> BlockSpans:
        """Returns the spans of one pool."""
        return cls(((num_blocks, block_bytes),))

    @property
    def num_blocks(self) -> int:
        return sum(num_blocks for num_blocks, _ in self.pools)

    @property
    def memory_bytes(self) -> int:
        return sum(num_blocks * size for num_blocks, size in self.pools)

    def span(self, block_id: int) -> slice:
        """Returns a block's place in the memory. Raises ValueError."""
        first = 0
        start = 0
        for num_blocks, size in self.pools:
            if 0 <= block_id - first < num_blocks:
                at = start + (block_id - first) * size
                return slice(at, at + size)
            first += num_blocks
            start += num_blocks * size
        raise ValueError(f"block {block_id} is not in pools of {self.num_blocks} blocks")

    def num_bytes(self, block_ids: Iterable[int]) -> int:
        """Returns the bytes of blocks together. Raises ValueError."""
        return sum(span.stop - span.start for span in map(self.span, block_ids))

    def count(self, block_ids: Sequence[int], num_bytes: int) -> int | None:
        """Returns how many first ones of these blocks have so many bytes; None: no number has."""
        for number, block_id in enumerate(block_ids):
            if num_bytes <= 0:
                return number if num_bytes == 0 else None
            span = self.span(block_id)
            num_bytes -= span.stop - span.start
        return None if num_bytes else len(block_ids)
