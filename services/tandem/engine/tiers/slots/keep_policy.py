"""The policies of a tier: which blocks it accepts, and which of them it evicts first.

    lru       accepts all; evicts the least recently used
    prefix    accepts all; evicts the blocks with the most tokens before them
    priority  accepts all; evicts the blocks whose highest request priority is lowest
    value     accepts blocks that were used twice or are to be kept; evicts the lowest value:
              (time to compute it again * recent frequency of use) / bytes

Under every policy only leaves are evicted, and none whose child is being written. All blocks have
the same number of bytes. Among blocks of equal worth, the least recently used is evicted.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tandem.common.perf_model.rates import DEFAULT_PREFILL, PrefillRate
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MIN
from tandem.engine.tiers.slots.frequency_sketch import FrequencySketch

# A block is accepted if its estimated uses reach this value: one use now, and another use at most
# one half-life ago.
_USES_MIN = 1.5
_KEPT_USES = 2  # number of uses that a use of a block that is to be kept counts for
# The fitted prefill rate changes with every step. A new rate is adopted only if it changes the
# worth of a block with _DEEP_TOKENS tokens before it, relative to a chain's first block, by at
# least _CHANGE_MIN (log2).
_DEEP_TOKENS = 8192
_CHANGE_MIN = 0.1
# The larger of these limits is the number of blocks whose priorities are remembered. These include
# blocks that no tier has yet.
_REMEMBERED_PER_SLOT = 2
_REMEMBERED_MIN = 65_536


class KeepPolicy(Protocol):
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Records that a sequence of this priority computed or reuses these blocks. `keep`: True if
        they are likely to be needed again."""

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """Records the blocks that the tier found when it started."""

    def take_rate(self, rate: PrefillRate) -> bool:
        """Adopts the worker's measured prefill rate, if the policy uses it. Returns whether some
        blocks may be worth less than before."""

    def takes(self, block_hash: bytes) -> bool:
        """Returns whether the tier should store a copy."""

    def worth(self, block_hash: bytes, index: int) -> float:
        """Returns the worth of a block at position `index` in its chain. Uses may raise it, and a
        new rate may change it."""


class LeastRecentlyUsed:
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Does nothing: the pool itself orders blocks by their last use."""

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
    """Remembers the highest priority of each of the most recently used blocks.

    The other blocks have the default priority: those that a tier found when it started, and those
    that were forgotten.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._priorities: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

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
        """Credits each block with as many uses as the policy requires to keep a block, because the
        block's real number of uses is unknown. A block that several KV groups have is credited
        once."""
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
        """Returns the logarithm of the block's value, which orders blocks as the value does."""
        return math.log2(1.0 + index * self._cost_by_index) + self._sketch.log2(block_hash)

    def _growth(self, rate: PrefillRate) -> float:
        """Returns the increase of a block's compute time per block before it, relative to the
        compute time of a chain's first block."""
        size = self._block_size
        context_s = rate.token_context_s
        # seconds per token of a chain's first block
        first_s = rate.token_s + context_s * (size - 1) / 2 or context_s
        return size * context_s / first_s if first_s else 0.0


def keep_policy(name: str, num_slots: int, block_size: int) -> KeepPolicy:
    """Returns a new policy by its name in --kv-tier-policy."""
    made: dict[str, Callable[[], KeepPolicy]] = {
        "lru": LeastRecentlyUsed,
        "prefix": ShortestPrefixes,
        "priority": lambda: HighestPriorities(
            max(_REMEMBERED_MIN, _REMEMBERED_PER_SLOT * num_slots)
        ),
        "value": lambda: MostValuable(num_slots, block_size),
    }
    return made[name]()
