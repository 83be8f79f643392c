"""Tracks local blocks that an abandoned read may still write.

An abandoned read is an unfinished read of a pull that was given up. The local blocks of an
abandoned read are fenced: they must not be reused yet. Several reads of a pull may write the same
block, each another part of it. The block is fenced until the last of them has ended.

    event                                    method called   the read's local blocks afterwards
    the pull of the read is given up         `fail`          fenced
    the read has ended after all             `late_done`     safe, unless another abandoned read
                                                             may write them
    the consumer's agent was destroyed, and  `renewed`       safe: the agent's reads have ended
    the GPU's queued copies have ended

The second condition is only for a pool on a GPU, because destroying the agent does not wait for
copies over CUDA IPC.

Most abandoned reads end within `grace_s` seconds. Otherwise the agent must be replaced, which also
ends the reads of unfinished pulls. So the agent is replaced only while no pull is unfinished.

On a busy worker, some pull is always unfinished. So new pulls are refused if more than `blocks_max`
blocks are fenced, or if a read was abandoned more than `patience_s` seconds ago and has not ended.
Once the unfinished pulls have ended, the agent can be replaced.

This module does no I/O and reads no clock.
"""

from collections import Counter
from collections.abc import Iterable


class Fence:
    def __init__(self, *, blocks_max: int, grace_s: float, patience_s: float) -> None:
        self._blocks_max = blocks_max
        self._grace_s = grace_s
        self._patience_s = patience_s
        self.instance = 0  # how often the agent was replaced; part of the name of the next agent
        self._next_read = 0
        # number of an abandoned read -> local blocks that the read may write
        self._reads: dict[int, list[int]] = {}
        self._blocks: Counter[int] = Counter()  # fenced block -> number of reads that may write it
        # number of an abandoned read -> time at which `fail` was called, oldest first
        self._failed_at: dict[int, float] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def holds_reads(self) -> bool:
        """True if an abandoned read may still write blocks of the pool or scratch memory."""
        return bool(self._reads)

    @property
    def is_full(self) -> bool:
        return len(self._blocks) > self._blocks_max

    def refuses(self, now: float) -> bool:
        """Returns whether new pulls must be refused until the agent is replaced."""
        oldest = next(iter(self._failed_at.values()), now)
        return self.is_full or now > oldest + self._patience_s

    def fenced(self, block_ids: Iterable[int]) -> set[int]:
        """Returns those of `block_ids` that are fenced."""
        return self._blocks.keys() & block_ids

    def fail(self, block_ids: Iterable[int], now: float) -> int:
        """Fences the local blocks of an abandoned read. Returns the number assigned to the read."""
        blocks = list(block_ids)
        read, self._next_read = self._next_read, self._next_read + 1
        self._reads[read] = blocks
        self._blocks.update(blocks)
        self._failed_at[read] = now
        return read

    def late_done(self, read: int) -> list[int]:
        """Ends the fence of an abandoned read that is now DONE. Returns the blocks of the read that
        are safe now."""
        blocks = self._reads.pop(read)
        del self._failed_at[read]
        self._blocks -= Counter(blocks)
        return [block for block in blocks if block not in self._blocks]

    def renewal_due(self, now: float, num_pulls_under_way: int) -> bool:
        """Returns whether the consumer's agent should be replaced now."""
        if not self._reads or num_pulls_under_way:
            return False
        return self.is_full or now >= max(self._failed_at.values()) + self._grace_s

    def renewed(self) -> list[int]:
        """Ends the fence of all reads. The agent was destroyed before, and the GPU's queued copies
        have ended. Returns the blocks that were fenced."""
        blocks = sorted(self._blocks)
        self.instance += 1
        self._reads.clear()
        self._failed_at.clear()
        self._blocks.clear()
        return blocks
