"""The policy of a tier: which blocks it takes, and which of them it evicts first.

    lru       takes all; evicts what was used least recently
    prefix    takes all; evicts the blocks with the most tokens before them
    priority  takes all; evicts the blocks whose highest request had the lowest priority
    value     takes what was used twice, or is to be kept; evicts what is worth least:
              (time to compute it again * how often it was used lately) / bytes

Only leaves are evicted, whatever the policy says, and none whose child is being written. All blocks
have the same bytes. Of two that are worth the same the one goes that was used less recently.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tandem.common.perf_model.rates import DEFAULT_PREFILL, PrefillRate
from tandem.common.retention import PRIORITY_DEFAULT, PRIORITY_MIN
from tandem.engine.tiers.slots.frequency_sketch import FrequencySketch

# Uses of a block that is taken: now, and once in the half-life before. One that is to be kept
# counts twice at once.
_USES_MIN = 1.5
_KEPT_USES = 2
# A rate of prefill is taken when it changes what a block with so many tokens before it is worth,
# beside a chain's first one, by more than so much (log2). Fits of prefill change with every step.
_DEEP_TOKENS = 8192
_CHANGE_MIN = 0.1
# Blocks whose priorities are remembered: those of the tier, and others that no tier has yet.
_REMEMBERED_PER_SLOT = 2
_REMEMBERED_MIN = 65_536


class KeepPolicy(Protocol):
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """A sequence of this priority computed these blocks or reuses them; `keep`: they are likely
        to return."""

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """The tier found these blocks when it started."""

    def take_rate(self, rate: PrefillRate) -> bool:
        """The worker measured this rate of prefill. Returns whether blocks may be worth less now
        than before."""

    def takes(self, block_hash: bytes) -> bool:
        """Returns whether the tier is to have a copy."""

    def worth(self, block_hash: bytes, index: int) -> float:
        """Returns what a block is worth that has `index` others before it. It may grow by uses, and
        change by a rate."""


class LeastRecentlyUsed:
    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Does nothing."""

    def restore(self, block_hashes: Collection[bytes]) -> None:
        """Does nothing."""

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
    """Remembers the highest priority of each of the blocks that were used last. The others have the
    default one: those that a tier found when it started, and those that were forgotten."""

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._priorities: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    def use(
        self, block_hashes: Sequence[bytes], *, keep: bool, priority: int = PRIORITY_DEFAULT
    ) -> None:
        """Raises the blocks to this priority. Those not remembered get it as it is."""
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
        """Counts the uses for which the tier once took them: nobody knows of later ones. A block
        that several KV groups have is counted for the first of them."""
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
        """Returns the logarithm, which has the same order."""
        return math.log2(1.0 + index * self._cost_by_index) + self._sketch.log2(block_hash)

    def _growth(self, rate: PrefillRate) -> float:
        """Returns what each block before it adds to the time to compute a block, relative to that
        of a chain's first block."""
        size = self._block_size
        context_s = rate.token_context_s
        first_s = rate.token_s + context_s * (size - 1) / 2 or context_s  # of a token
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
