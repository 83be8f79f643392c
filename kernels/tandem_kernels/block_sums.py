"""Sums the softmax weights that a step's queries give each block of keys.

    sums[j] += sum of a query's weights of the keys of block j, over queries, layers and heads

in fp32 and in one order: key after key, head after head, layer after layer, and query after query.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class BlockShares:
    """A sequence's queries of one step, with what their weights of each block sum to so far."""

    def __init__(
        self, sums: npt.NDArray[np.float32], num_queries: int, block_size: int, device: torch.device
    ) -> None:
        """`sums` [blocks] are of the steps before."""
        self._sums = sums
        self._block_size = block_size
        self._of_queries = torch.zeros(num_queries, len(sums), device=device)

    def add(self, weights: torch.Tensor) -> None:
        """Adds fp32 weights [queries, heads, keys]; there may be more keys, with the weight 0."""
        num_queries, num_heads, _ = weights.shape
        num_keys = self._of_queries.shape[1] * self._block_size
        blocks = weights[..., :num_keys].reshape(num_queries, num_heads, -1, self._block_size)
        shares = torch.zeros_like(blocks[..., 0])
        for key in range(self._block_size):
            shares += blocks[..., key]
        for head in range(num_heads):
            self._of_queries += shares[:, head]

    def finish(self) -> None:
        """Adds the step's to the sums."""
        for of_query in self._of_queries.cpu().numpy():
            self._sums += of_query
