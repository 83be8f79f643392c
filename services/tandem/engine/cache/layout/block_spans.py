"""Finds the bytes of a block by its id. The pools of all KV groups lie one after the other in one
span of memory. All blocks of a pool have the same size.

The engine process, the worker process and the transports use this module to find blocks. It imports
no other module of Tandem.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class BlockSpans:
    """The position of each block in the memory of all pools. Block ids continue from pool to pool:
    with pools of 10 and 20 blocks, the ids 10 to 29 are in the second pool."""

    pools: tuple[tuple[int, int], ...]  # for each pool: (number of blocks, bytes of a block)

    @classmethod
    def equal(cls, block_bytes: int, num_blocks: int) -> BlockSpans:
        """Returns the spans of a single pool, whose blocks all have `block_bytes` bytes."""
        return cls(((num_blocks, block_bytes),))

    @property
    def num_blocks(self) -> int:
        return sum(num_blocks for num_blocks, _ in self.pools)

    @property
    def memory_bytes(self) -> int:
        return sum(num_blocks * size for num_blocks, size in self.pools)

    def span(self, block_id: int) -> slice:
        """Returns the range of bytes that a block has in the memory. Raises ValueError for an
        unknown id."""
        first = 0
        start = 0
        for num_blocks, size in self.pools:
            if 0 <= block_id - first < num_blocks:
                at = start + (block_id - first) * size
                return slice(at, at + size)
            first += num_blocks
            start += num_blocks * size
        raise ValueError(f"block id is {block_id}; it must be from 0 to {self.num_blocks - 1}")

    def num_bytes(self, block_ids: Iterable[int]) -> int:
        """Returns the total bytes of these blocks. Raises ValueError for an unknown id."""
        return sum(self.sizes(block_ids))

    def sizes(self, block_ids: Iterable[int]) -> list[int]:
        """Returns the bytes of each of these blocks. Raises ValueError for an unknown id."""
        if len(self.pools) == 1:  # no Python loop over the blocks of a long prompt
            block_ids = list(block_ids)
            num_blocks, size = self.pools[0]
            if not block_ids or (min(block_ids) >= 0 and max(block_ids) < num_blocks):
                return [size] * len(block_ids)
        return [span.stop - span.start for span in map(self.span, block_ids)]

    def split(self, block_ids: Sequence[int], bytes_max: int) -> Iterator[Sequence[int]]:
        """Yields the blocks in runs of at most `bytes_max` bytes, or of one larger block."""
        first = num_bytes = 0
        for number, block_id in enumerate(block_ids):
            span = self.span(block_id)
            num_bytes += span.stop - span.start
            if num_bytes > bytes_max and number > first:
                yield block_ids[first:number]
                first, num_bytes = number, span.stop - span.start
        if block_ids:
            yield block_ids[first:]

    def shares(self, block_ids: Sequence[int], num_shares: int) -> list[range]:
        """Divides the blocks into at most `num_shares` runs of about as many bytes each. Returns
        the indices of each run's blocks in `block_ids`."""
        ends = list(accumulate(self.sizes(block_ids)))
        cuts = {bisect_right(ends, ends[-1] * number / num_shares) for number in range(num_shares)}
        return [range(*run) for run in pairwise([*sorted(cuts), len(ends)])]

    def count(self, block_ids: Sequence[int], num_bytes: int) -> int | None:
        """Returns n such that the first n of these blocks have exactly `num_bytes` bytes in total.
        Returns None if there is no such n."""
        for number, block_id in enumerate(block_ids):
            if num_bytes <= 0:
                return number if num_bytes == 0 else None
            span = self.span(block_id)
            num_bytes -= span.stop - span.start
        return None if num_bytes else len(block_ids)
