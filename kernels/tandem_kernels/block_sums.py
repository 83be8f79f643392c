"""Sums the softmax weights that a step's queries give to each block of keys. A KV budget that keeps
heavy hitters evicts the blocks with the smallest sums.

    sums[j] += sum of the weights of the keys in block j, over queries, layers and heads

The sums are fp32. Weights are always added in the same order: over the keys of a block, then over
heads, then over layers, then over queries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class BlockShares:
    """Sums the softmax weights that one step gives to each block of one sequence."""

    def __init__(
        self, sums: npt.NDArray[np.float32], num_queries: int, block_size: int, device: torch.device
    ) -> None:
        """`sums` [blocks] has the sums of earlier steps. `finish` adds this step's sums to them."""
        self._sums = sums
        self._block_size = block_size
        self._query_sums = torch.zeros(num_queries, len(sums), device=device)

    def add(self, weights: torch.Tensor) -> None:
        """Adds the softmax weights of one layer, fp32 [queries, heads, keys]. Keys after the last
        block are padding and are ignored."""
        num_queries, num_heads, _ = weights.shape
        num_keys = self._query_sums.shape[1] * self._block_size
        blocks = weights[..., :num_keys].reshape(num_queries, num_heads, -1, self._block_size)
        shares = torch.zeros_like(blocks[..., 0])
        for key in range(self._block_size):
            shares += blocks[..., key]
        for head in range(num_heads):
            self._query_sums += shares[:, head]

    def finish(self) -> None:
        """Adds the step's sums to the array that was passed to the constructor."""
        for query_sums in self._query_sums.cpu().numpy():
            self._sums += query_sums
