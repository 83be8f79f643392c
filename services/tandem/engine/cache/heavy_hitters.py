"""The blocks that a sequence keeps under a KV budget with heavy hitters.

The sequence's table has only the kept blocks, in order. Attention is independent of the order of
keys, and keys keep the rotations of their own positions, so the kernels simply see a shorter
context. At fixed eviction points, which depend on the number of computed tokens alone, the blocks
with the least attention so far are evicted:

    before an eviction   [ sinks | heavy hitters and others | recent ]     at most `budget.tokens`
    after an eviction    [ sinks | heavy hitters | recent ][ free for the next tokens ]

A block spans all heads and layers, and so does its sum of attention weights. Evicted tokens are not
attended to again. Chunks, steps and workers do not change the sums, so the same tokens always lead
to the eviction of the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.common.kv_budget import KvBudget
from tandem.errors import InternalError

Sums = npt.NDArray[np.float32]

_BORDER_TOKENS = 64  # distance between eviction points, rounded up to whole blocks


class HeavyHitters:
    """Decides which blocks are evicted from a table. `num_evicted_tokens` counts the tokens of
    evicted blocks."""

    def __init__(self, budget: KvBudget, block_size: int) -> None:
        self._tokens = budget.tokens
        self._size = block_size
        self._border = border_tokens(block_size)
        self._num_sinks = -(-budget.sinks // block_size)  # in blocks
        others = budget.tokens - self._num_sinks * block_size - self._border
        self._num_recent = others // 2 // block_size  # in blocks
        # the first eviction point, in computed tokens
        self._first = budget.tokens // self._border * self._border
        self._sums: Sums = np.zeros(0, np.float32)
        self.num_evicted_tokens = 0

    def num_until_eviction(self, num_computed: int) -> int:
        """Returns the number of tokens that may be computed before the next eviction point."""
        if num_computed < self._first:
            return self._first - num_computed
        return self._border - num_computed % self._border

    def num_blocks(self, num_computed: int) -> int:
        """Returns the number of blocks in the table that have KV after `num_computed` tokens were
        computed."""
        return -(-num_computed // self._size) - self._evicted_at(num_computed)

    def set_sums(self, num_computed: int, sums: Sequence[float]) -> None:
        """Takes over a peer's attention sums, one per block of a table with `num_computed` computed
        tokens.

        Raises InternalError if the number of sums differs from the number of blocks.
        """
        num_blocks = self.num_blocks(num_computed)
        if len(sums) != num_blocks:
            raise InternalError(f"{len(sums)} sums came with {num_blocks} blocks of KV")
        self._sums = np.array(sums, np.float32)
        self.num_evicted_tokens = self._evicted_at(num_computed) * self._size

    def sums(self, num_tokens: int) -> Sums:
        """Returns the attention sums [blocks] of the first `num_tokens` kept tokens. The caller
        adds to them in place."""
        num_blocks = -(-num_tokens // self._size)
        if num_blocks > len(self._sums):
            self._sums = np.concatenate((self._sums, np.zeros(num_blocks, np.float32)))
        return self._sums[:num_blocks]

    def evict(self, table: list[int], num_computed: int) -> None:
        """Evicts blocks if `num_computed` is an eviction point.

        The evicted blocks move to the table's end, where later tokens overwrite them.
        """
        num = self._evicted_at(num_computed) - self.num_evicted_tokens // self._size
        if not num:
            return
        num_blocks = (num_computed - self.num_evicted_tokens) // self._size
        sums = self.sums(num_blocks * self._size)
        first = self._num_sinks
        end = num_blocks - self._num_recent
        # The sort is stable, so the oldest of blocks with equal sums is evicted first.
        order = np.argsort(sums[first:end], kind="stable")
        left = sorted((order[:num] + first).tolist())
        kept = sorted(set(range(num_blocks)).difference(left))
        table[:num_blocks] = [table[i] for i in (*kept, *left)]
        self._sums = np.concatenate((sums[kept], np.zeros(num, np.float32)))
        self.num_evicted_tokens += num * self._size

    def _evicted_at(self, num_computed: int) -> int:
        """Returns the number of blocks that are evicted by the time `num_computed` tokens are
        computed."""
        if num_computed < self._first:
            return 0
        at_first = -(-(self._first + self._border - self._tokens) // self._size)
        since = (num_computed - self._first) // self._border
        return at_first + since * (self._border // self._size)


def border_tokens(block_size: int) -> int:
    """Returns the number of tokens between two eviction points."""
    return -(-_BORDER_TOKENS // block_size) * block_size


def least_tokens(sinks: int, block_size: int) -> int:
    """Returns the smallest budget in tokens: the sinks, plus one eviction interval each for new
    tokens, recent blocks and heavy hitters."""
    return -(-sinks // block_size) * block_size + 3 * border_tokens(block_size)
