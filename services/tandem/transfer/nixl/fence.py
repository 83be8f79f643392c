"""Tracks local blocks that a given-up read may still write, and when that must be ended.

    fail(read) --> fenced --late_done(read)--> safe     its last byte has landed
                         `--renewed()--------> safe     the consumer that could write is gone

A read belongs to the consumer of its instance. Making the consumer anew ends all of that instance
at once, and would end pulls under way too: so it waits until there are none. Reads that were given
up get `grace_s` to finish by themselves first; most do. Past `blocks_max` fenced blocks, or when a
read has waited for `patience_s`, new pulls are refused, so that those under way run out and the
renewal comes, however busy the worker is.

Pure bookkeeping: it knows no transport and no clock.
"""

from collections.abc import Iterable


class Fence:
    def __init__(self, *, blocks_max: int, grace_s: float, patience_s: float) -> None:
        self._blocks_max = blocks_max
        self._grace_s = grace_s
        self._patience_s = patience_s
        self.instance = 0  # counts the consumers that were made; part of their names
        self._next_read = 0
        self._reads: dict[int, list[int]] = {}  # read -> blocks that it may still write
        self._blocks: set[int] = set()
        self._failed_at: dict[int, float] = {}  # of those reads, the oldest first

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def holds_reads(self) -> bool:
        """True if any given-up read may still write somewhere, be it scratch memory."""
        return bool(self._reads)

    @property
    def is_full(self) -> bool:
        return len(self._blocks) > self._blocks_max

    def refuses(self, now: float) -> bool:
        """New pulls must be refused until the consumer is made anew."""
        oldest = next(iter(self._failed_at.values()), now)
        return self.is_full or now > oldest + self._patience_s

    def fenced(self, block_ids: Iterable[int]) -> set[int]:
        """Returns those of `block_ids` that may still be written."""
        return self._blocks.intersection(block_ids)

    def fail(self, block_ids: Iterable[int], now: float) -> int:
        """A read under way was given up; answers the number to name it by in `late_done`."""
        blocks = list(block_ids)
        assert not self._blocks.intersection(blocks), "a fenced block was read into again"
        read, self._next_read = self._next_read, self._next_read + 1
        self._reads[read] = blocks
        self._blocks.update(blocks)
        self._failed_at[read] = now
        return read

    def late_done(self, read: int) -> list[int]:
        """The read has ended by itself; answers the blocks that are safe now."""
        blocks = self._reads.pop(read)
        del self._failed_at[read]
        self._blocks.difference_update(blocks)
        return blocks

    def renewal_due(self, now: float, num_pulls_under_way: int) -> bool:
        """Returns whether the consumer should be made anew now."""
        if not self._reads or num_pulls_under_way:
            return False
        return self.is_full or now >= max(self._failed_at.values()) + self._grace_s

    def renewed(self) -> list[int]:
        """The consumer of this instance is destroyed; answers the blocks that are safe now."""
        blocks = sorted(self._blocks)
        self.instance += 1
        self._reads.clear()
        self._failed_at.clear()
        self._blocks.clear()
        return blocks
