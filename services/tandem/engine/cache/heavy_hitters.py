"""The blocks that a sequence keeps under a KV budget with heavy hitters.

Its table has only what it keeps, in order: attention knows no positions, so the kernels see a
shorter context, whose keys have the rotations of their own positions. At borders, which depend on
the number of computed tokens alone, the blocks leave that had the least attention until then:

    n computed tokens   [ sinks | heavy hitters and others | recent ]          up to `tokens`
    at a border         [ sinks | heavy hitters | recent ][ free for the tokens to come ]

A block is of all heads and layers, and so is its sum. What left is not seen again. The same tokens
have the same sums and so leave the same blocks, whatever chunks, steps or workers compute them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.common.kv_budget import KvBudget
from tandem.errors import InternalError

Sums = npt.NDArray[np.float32]

_BORDER_TOKENS = 64  # from one border to the next; a whole number of blocks, so more if they are


class HeavyHitters:
    """Decides which blocks leave a table. `num_passed_tokens` are the tokens of those that left."""

    def __init__(self, budget: KvBudget, block_size: int) -> None:
        self._tokens = budget.tokens
        self._size = block_size
        self._border = border_tokens(block_size)
        self._num_sinks = -(-budget.sinks // block_size)  # blocks
        others = budget.tokens - self._num_sinks * block_size - self._border
        self._num_recent = others // 2 // block_size  # blocks
        self._first = budget.tokens // self._border * self._border  # the first border
        self._sums: Sums = np.zeros(0, np.float32)
        self.num_passed_tokens = 0

    def num_left(self, num_computed: int) -> int:
        """Returns how many tokens may be computed together after so many."""
        if num_computed < self._first:
            return self._first - num_computed
        return self._border - num_computed % self._border

    def num_blocks(self, num_computed: int) -> int:
        """Returns how many blocks the table has KV in after so many tokens were computed."""
        return -(-num_computed // self._size) - self._passed_at(num_computed)

    def take(self, num_computed: int, sums: Sequence[float]) -> None:
        """Takes the sums of a table that a peer computed so many tokens for. Raises InternalError
        if there are not as many as blocks."""
        num_blocks = self.num_blocks(num_computed)
        if len(sums) != num_blocks:
            raise InternalError(f"{len(sums)} sums came with {num_blocks} blocks of KV")
        self._sums = np.array(sums, np.float32)
        self.num_passed_tokens = self._passed_at(num_computed) * self._size

    def sums(self, num_tokens: int) -> Sums:
        """Returns the weights that the blocks of so many kept tokens attracted, to be added to."""
        num_blocks = -(-num_tokens // self._size)
        if num_blocks > len(self._sums):
            self._sums = np.concatenate((self._sums, np.zeros(num_blocks, np.float32)))
        return self._sums[:num_blocks]

    def evict(self, table: list[int], num_computed: int) -> None:
        """Lets blocks leave if so many computed tokens are a border: they are the table's last ones
        from then on, and written again."""
        num = self._passed_at(num_computed) - self.num_passed_tokens // self._size
        if not num:
            return
        num_blocks = (num_computed - self.num_passed_tokens) // self._size
        sums = self.sums(num_blocks * self._size)
        first, end = self._num_sinks, num_blocks - self._num_recent
        order = np.argsort(sums[first:end], kind="stable")  # of equals the oldest first
        left = sorted((order[:num] + first).tolist())
        kept = sorted(set(range(num_blocks)).difference(left))
        table[:num_blocks] = [table[i] for i in (*kept, *left)]
        self._sums = np.concatenate((sums[kept], np.zeros(num, np.float32)))
        self.num_passed_tokens += num * self._size

    def _passed_at(self, num_computed: int) -> int:
        """Returns how many blocks left until so many tokens were computed."""
        if num_computed < self._first:
            return 0
        at_first = -(-(self._first + self._border - self._tokens) // self._size)
        since = (num_computed - self._first) // self._border
        return at_first + since * (self._border // self._size)


def border_tokens(block_size: int) -> int:
    """Returns the tokens from one border to the next."""
    return -(-_BORDER_TOKENS // block_size) * block_size


def least_tokens(sinks: int, block_size: int) -> int:
    """Returns the smallest budget: two thirds of what sinks leave are not up for choice."""
    return -(-sinks // block_size) * block_size + 3 * border_tokens(block_size)
