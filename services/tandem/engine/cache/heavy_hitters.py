"""Chooses the blocks that a sequence keeps under a KV budget with heavy hitters.

Heavy hitters are the blocks that received the most attention. Once the budget is used up, the
blocks with the smallest sums of attention weights are evicted after every 64 tokens. The first
blocks (the sinks) and the most recent blocks are never evicted. In this example the budget is 512
tokens with 16 sinks, and a block has 16 tokens. The numbers are blocks:

    before an eviction   [ 1 sink | 18 others        | 13 recent ]
    after the eviction   [ 1 sink | 14 heavy hitters | 13 recent | 4 free for the next 64 tokens ]

Later tokens do not attend to evicted tokens. The kept blocks stay in the order of their tokens, and
the kernels see a shorter context. This is correct because each cached key was already rotated for
its own position, and attention does not depend on the order of keys.

A block has one sum for all its heads and layers. The same tokens always lead to the same evictions:
the eviction points depend only on the number of computed tokens, and the sums do not depend on
chunks, steps or the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.common.kv_budget import KvBudget
from tandem.errors import InternalError

Sums = npt.NDArray[np.float32]

# Number of tokens between two eviction points, before it is rounded up to whole blocks.
_BORDER_TOKENS = 64


class HeavyHitters:
    """Keeps the attention sums of one sequence's blocks and evicts blocks from its table.
    `num_evicted_tokens` counts the tokens of the evicted blocks."""

    def __init__(self, budget: KvBudget, block_size: int) -> None:
        self._tokens = budget.tokens
        self._size = block_size
        self._border = border_tokens(block_size)
        self._num_sinks = -(-budget.sinks // block_size)  # number of blocks with sinks
        others = budget.tokens - self._num_sinks * block_size - self._border
        # Number of most recent blocks that are never evicted.
        self._num_recent = others // 2 // block_size
        # Number of computed tokens at the first eviction point.
        self._first = budget.tokens // self._border * self._border
        self._sums: Sums = np.zeros(0, np.float32)
        self.num_evicted_tokens = 0

    def num_until_eviction(self, num_computed: int) -> int:
        """Returns the number of tokens that may be computed before the next eviction point."""
        if num_computed < self._first:
            return self._first - num_computed
        return self._border - num_computed % self._border

    def num_blocks(self, num_computed: int) -> int:
        """Returns how many blocks of the table have KV once `num_computed` tokens are computed."""
        return -(-num_computed // self._size) - self._evicted_at(num_computed)

    def set_sums(self, num_computed: int, sums: Sequence[float]) -> None:
        """Sets the attention sums to those of a peer that has computed `num_computed` tokens.

        Raises InternalError if there is not one sum for each block of the table.
        """
        num_blocks = self.num_blocks(num_computed)
        if len(sums) != num_blocks:
            raise InternalError(
                f"the peer sent {len(sums)} attention sums for {num_blocks} KV blocks; each "
                "block needs one sum"
            )
        self._sums = np.array(sums, np.float32)
        self.num_evicted_tokens = self._evicted_at(num_computed) * self._size

    def sums(self, num_tokens: int) -> Sums:
        """Returns the attention sums, one for each block of the first `num_tokens` kept tokens. The
        caller adds new attention weights to this array in place."""
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
        """Returns the number of blocks evicted in total once `num_computed` tokens are computed."""
        if num_computed < self._first:
            return 0
        at_first = -(-(self._first + self._border - self._tokens) // self._size)
        since = (num_computed - self._first) // self._border
        return at_first + since * (self._border // self._size)


def border_tokens(block_size: int) -> int:
    """Returns the number of tokens between two eviction points."""
    return -(-_BORDER_TOKENS // block_size) * block_size


def least_tokens(sinks: int, block_size: int) -> int:
    """Returns the smallest allowed budget in tokens: room for the sinks, and 64 tokens each for new
    tokens, recent blocks and heavy hitters (all rounded up to whole blocks). With 16 sinks and
    blocks of 16 tokens it is 16 + 3 * 64 = 208."""
    return -(-sinks // block_size) * block_size + 3 * border_tokens(block_size)
