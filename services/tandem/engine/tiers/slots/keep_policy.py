"""The policies of a tier: which blocks it accepts, and which of them it evicts first.

    policy     accepts                      evicts first
    lru        all blocks                   the least recently used block
    prefix     all blocks                   the block with the most tokens before it
    priority   all blocks                   the block with the lowest priority (the highest
                                            priority of the requests that used it)
    value      blocks that were used        the block with the lowest value: time to compute
               twice or are to be kept      the block again * recent frequency of its use

Under every policy only leaves are evicted (blocks without children in the tier), and no parent of a
block that is being written. Among blocks of equal worth, the least recently used is evicted. The
value is not divided by the size of a block, because all blocks have the same size.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tandem.common.perf_model.rates import DEFAULT_PREFILL, PrefillRate
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MIN
from tandem.engine.tiers.slots.frequency_sketch import FrequencySketch

# A block is accepted if its estimated number of uses is at least this. A use now counts 1, and one
# a half-life ago counts 0.5, so two uses within a half-life are enough.
_USES_MIN = 1.5
_KEPT_USES = 2  # a use of a block that is to be kept counts as this many uses
# The measured prefill rate changes a little with every step. From a rate follows a ratio: the time
# to compute a block after _DEEP_TOKENS tokens, divided by the time for a chain's first block. A new
# rate is adopted only if it changes log2 of this ratio by at least _CHANGE_MIN.
_DEEP_TOKENS = 8192
_CHANGE_MIN = 0.1
# `HighestPriorities` remembers the priorities of this many blocks for each slot of the tier, but of
# at least _REMEMBERED_MIN blocks. A remembered block need not be in the tier.
_REMEMBERED_PER_SLOT = 2
_REMEMBERED_MIN = 65_536


class KeepPolicy(Protocol):
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Records that a sequence of this priority computed or reused these blocks. `keep`: True if
        the blocks are likely to be needed again."""

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """Records the blocks that the tier already had when it started."""

    def take_rate(self, rate: PrefillRate) -> bool:
        """Adopts the worker's measured prefill rate, if the policy depends on it. Returns whether
        the worth of some blocks may have become lower."""

    def takes(self, block_hash: bytes) -> bool:
        """Returns whether the tier should store a copy of this block."""

    def worth(self, block_hash: bytes, index: int) -> float:
        """Returns the worth of a block at position `index` in its chain. A use can only raise the
        worth. A new prefill rate may raise or lower it."""


class LeastRecentlyUsed:
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Does nothing: the pool itself orders blocks of equal worth by their last use."""

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """Does nothing: restored blocks have no use yet."""

    def take_rate(self, rate: PrefillRate) -> bool:
        return False

    def takes(self, block_hash: bytes) -> bool:
        return True

    def worth(self, block_hash: bytes, index: int) -> float:
        return 0.0


class ShortestPrefixes(LeastRecentlyUsed):
    def worth(self, block_hash: bytes, index: int) -> float:
        return -float(index)


class HighestPriorities(LeastRecentlyUsed):
    """Remembers the highest priority with which each block was used, for a limited number of the
    most recently used blocks.

    A block that is not remembered has the default priority, for example a block that the tier found
    when it started.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        # priority by block hash; the least recently used block is first
        self._priorities: OrderedDict[bytes, int] = OrderedDict()

    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Raises the priorities of these blocks to at least `priority`. Blocks that are not
        remembered get exactly this priority."""
        priorities = self._priorities
        for block_hash in block_hashes:
            priorities[block_hash] = max(priority, priorities.get(block_hash, PRIORITY_MIN))
            priorities.move_to_end(block_hash)
        while len(priorities) > self._num_remembered:
            priorities.popitem(last=False)

    def worth(self, block_hash: bytes, index: int) -> float:
        return float(self._priorities.get(block_hash, PRIORITY_DEFAULT))


class MostValuable:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._sketch = FrequencySketch(num_slots)
        self._block_size = block_size
        self._cost_by_index = self._growth(DEFAULT_PREFILL)

    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        self._sketch.add(block_hashes, _KEPT_USES if keep else 1)

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """Counts `_KEPT_USES` uses of each block, because the real number of uses is not known. A
        block that several KV groups have is counted once."""
        new = [each for each in block_hashes if not self._sketch.estimate(each)]
        self._sketch.add(new, _KEPT_USES)

    def take_rate(self, rate: PrefillRate) -> bool:
        growth = self._growth(rate)
        index = _DEEP_TOKENS // self._block_size
        change = math.log2((1.0 + index * growth) / (1.0 + index * self._cost_by_index))
        if abs(change) < _CHANGE_MIN:
            return False
        self._cost_by_index = growth
        return change < 0.0

    def takes(self, block_hash: bytes) -> bool:
        return self._sketch.estimate(block_hash) >= _USES_MIN

    def worth(self, block_hash: bytes, index: int) -> float:
        """Returns the logarithm of the block's value. Blocks have the same order by worth as by
        value."""
        return math.log2(1.0 + index * self._cost_by_index) + self._sketch.log2(block_hash)

    def _growth(self, rate: PrefillRate) -> float:
        """Returns how much longer each block of a chain takes to compute than the block before it,
        as a fraction of the time for the chain's first block. With 0.01, the block at index 100
        takes twice as long as the first block."""
        size = self._block_size
        context_s = rate.token_context_s
        # seconds per token in the first block of a chain
        first_s = rate.token_s + context_s * (size - 1) / 2 or context_s
        return size * context_s / first_s if first_s else 0.0


def keep_policy(name: str, num_slots: int, block_size: int) -> KeepPolicy:
    """Returns a new policy for the value of --kv-tier-policy."""
    made: dict[str, Callable[[], KeepPolicy]] = {
        "lru": LeastRecentlyUsed,
        "prefix": ShortestPrefixes,
        "priority": lambda: HighestPriorities(
            max(_REMEMBERED_MIN, _REMEMBERED_PER_SLOT * num_slots)
        ),
        "value": lambda: MostValuable(num_slots, block_size),
    }
    return made[name]()
