"""Dequantizes matrices to the compute dtype, a few rows at a time, so that a model needs little
more memory than its quantized weights.

The torch decoder uses this for all quantized formats. The Triton decoder uses it for formats that
no Triton kernel multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tandem.engine.executor.weights.decoder_weights import Linear, ModelWeights

_NUMBERS_AT_ONCE = 1 << 20
# Number of weights that are dequantized at a time on a GPU. It is larger than `_NUMBERS_AT_ONCE`,
# the number on the CPU, because each operation on a GPU has a launch cost.
_ON_A_DEVICE = 16 << 20


def pieces(matrix: Linear) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields a matrix in pieces of consecutive rows. Each item is the dequantized weights [rows,
    in] and the biases [rows], or None for no biases. A matrix that is not quantized is one
    piece."""
    if matrix.blocks is None:
        yield matrix.weight, matrix.bias
        return
    num_out, num_in = matrix.weight.shape
    is_cpu = matrix.blocks.data.device.type == "cpu"
    at_once = max(1, (_NUMBERS_AT_ONCE if is_cpu else _ON_A_DEVICE) // num_in)
    for first in range(0, num_out, at_once):
        end = min(first + at_once, num_out)
        weight = matrix.blocks.between(first, end).numbers().to(matrix.weight.dtype)
        yield weight, None if matrix.bias is None else matrix.bias[first:end]


def whole(matrix: Linear) -> torch.Tensor:
    """Returns the weights of a small matrix in float32, dequantized if necessary, [out, in]."""
    return torch.cat([weight.float() for weight, _ in pieces(matrix)])


def embedded(weights: ModelWeights, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the embeddings of tokens, [tokens, hidden], dequantized if necessary."""
    if weights.embedding_blocks is None:
        return torch.nn.functional.embedding(token_ids, weights.embedding)
    return weights.embedding_blocks.in_order(token_ids).numbers().to(weights.embedding.dtype)
