"""The streams of DeepSeek V4's residual stream (models/config/deepseek_v4.py).

All sums over the streams are computed one after the other, so that the bits of a row do not depend
on the other rows of a step.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tandem.engine.executor.weights.decoder_weights import StreamWeights
from tandem.models.config.deepseek_v4 import Streams
from tandem_kernels.dispatch import Kernels

_VECTOR = 32  # largest number of elements that torch computes at once, or a multiple of it


class Mixture(NamedTuple):
    """How the output of attention or of an MLP is added to the streams."""

    factors: torch.Tensor  # [T, streams]: factors on the output
    matrix: torch.Tensor  # [T, streams, streams]: new stream k has matrix[:, j, k] of stream j


class ResidualStreams:
    """Computes the streams of T tokens, [T, streams, hidden]."""

    def __init__(self, sizes: Streams, kernels: Kernels, norm_eps: float) -> None:
        self._sizes = sizes
        self._kernels = kernels
        self._norm_eps = norm_eps

    def collapse(self, weights: StreamWeights, streams: torch.Tensor) -> torch.Tensor:
        """Returns a weighted sum of the streams, [T, hidden]."""
        products = self._products(weights, streams) * weights.scale[0] + weights.base
        return _weighted(streams, _sigmoid(products) + self._sizes.eps)

    def split(self, weights: StreamWeights, streams: torch.Tensor) -> tuple[torch.Tensor, Mixture]:
        """Returns the input of attention or of an MLP, [T, hidden], and how to add its output."""
        num, eps = self._sizes.num, self._sizes.eps
        sizes = [num, num, num * num]
        parts = zip(
            torch.split(self._products(weights, streams), sizes, 1),
            torch.split(weights.base, sizes),
            weights.scale,
            strict=True,
        )
        before, after, matrix = (product * scale + base for product, base, scale in parts)
        gates = _sigmoid(torch.cat((before, after), 1))
        matrix = torch.softmax(matrix.view(-1, num, num), -1) + eps
        matrix = matrix / (_sum(matrix, 1) + eps)
        for _ in range(self._sizes.num_iterations - 1):
            matrix = matrix / (_sum(matrix, 2) + eps)
            matrix = matrix / (_sum(matrix, 1) + eps)
        collapsed = _weighted(streams, gates[:, :num] + eps)
        return collapsed, Mixture(2 * gates[:, num:], matrix)

    def add(self, mixture: Mixture, streams: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns the streams after the output of attention or of an MLP, [T, hidden], is added."""
        mixed = [
            mixture.factors[:, to, None] * output + _weighted(streams, mixture.matrix[:, :, to])
            for to in range(self._sizes.num)
        ]
        return torch.stack(mixed, 1).to(streams.dtype)

    def _products(self, weights: StreamWeights, streams: torch.Tensor) -> torch.Tensor:
        """Returns the products of the tokens' normalized streams, float32 [T, outputs]."""
        flat = streams.flatten(1).float()
        normed = self._kernels.rms_norm(flat, flat.new_ones(flat.shape[1]), self._norm_eps)
        return self._kernels.linear(normed, weights.matrix, None)


def _weighted(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the streams times `weights` [T, streams], in the dtype of the streams."""
    total = streams[:, 0] * weights[:, :1]
    for number in range(1, streams.shape[1]):
        total = total + streams[:, number] * weights[:, number, None]
    return total.to(streams.dtype)


def _sum(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    first, *others = torch.split(matrix, 1, dim)
    for each in others:
        first = first + each
    return first


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns the sigmoid. Its bits depend on the place in a vector, so a row takes whole ones."""
    return torch.sigmoid(pad(x, (0, -x.shape[1] % _VECTOR)))[:, : x.shape[1]]
