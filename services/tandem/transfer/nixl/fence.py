"""Tracks local blocks that an abandoned read may still write.

An abandoned read is an unfinished read of a pull that was given up. The local blocks of an
abandoned read are fenced: they must not be reused yet.

    method        event                                       local blocks of the read
    `fail`        the pull of the read is given up            fenced
    `late_done`   the read has ended after all                safe: all bytes are in place
    `renewed`     the consumer's agent was replaced           safe: the agent's reads have ended

Abandoned reads get `grace_s` seconds to end, and most do. After that, the agent must be replaced.
This would also end the reads of unfinished pulls, so it is done only while no pull is unfinished.

On a busy worker, some pull is always unfinished. So new pulls are refused if more than `blocks_max`
blocks are fenced or a read has been fenced for `patience_s` seconds. Once the unfinished pulls have
ended, the agent can be replaced. This module does no I/O and reads no clock.
"""

from collections.abc import Iterable


class Fence:
    def __init__(self, *, blocks_max: int, grace_s: float, patience_s: float) -> None:
        self._blocks_max = blocks_max
        self._grace_s = grace_s
        self._patience_s = patience_s
        self.instance = 0  # number of replacements so far; part of the agent's name
        self._next_read = 0
        self._reads: dict[int, list[int]] = {}  # read number -> blocks that the read may write
        self._blocks: set[int] = set()
        self._failed_at: dict[int, float] = {}  # read number -> time of `fail`, oldest first

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def holds_reads(self) -> bool:
        """True if an abandoned read may still write local memory, including scratch memory."""
        return bool(self._reads)

    @property
    def is_full(self) -> bool:
        return len(self._blocks) > self._blocks_max

    def refuses(self, now: float) -> bool:
        """Returns whether new pulls must be refused until the agent is replaced."""
        oldest = next(iter(self._failed_at.values()), now)
        return self.is_full or now > oldest + self._patience_s

    def fenced(self, block_ids: Iterable[int]) -> set[int]:
        """Returns the subset of `block_ids` that may still be written."""
        return self._blocks.intersection(block_ids)

    def fail(self, block_ids: Iterable[int], now: float) -> int:
        """Fences the blocks of an abandoned read; returns a number that identifies the read."""
        blocks = list(block_ids)
        assert not self._blocks.intersection(blocks), "a fenced block was read into again"
        read, self._next_read = self._next_read, self._next_read + 1
        self._reads[read] = blocks
        self._blocks.update(blocks)
        self._failed_at[read] = now
        return read

    def late_done(self, read: int) -> list[int]:
        """Ends the fence of a read that is DONE after all; returns the blocks that are safe now."""
        blocks = self._reads.pop(read)
        del self._failed_at[read]
        self._blocks.difference_update(blocks)
        return blocks

    def renewal_due(self, now: float, num_pulls_under_way: int) -> bool:
        """Returns whether the consumer's agent should be replaced now."""
        if not self._reads or num_pulls_under_way:
            return False
        return self.is_full or now >= max(self._failed_at.values()) + self._grace_s

    def renewed(self) -> list[int]:
        """Clears the fence after the agent was destroyed; returns the blocks that are safe now."""
        blocks = sorted(self._blocks)
        self.instance += 1
        self._reads.clear()
        self._failed_at.clear()
        self._blocks.clear()
        return blocks
