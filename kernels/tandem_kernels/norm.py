"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467).

Gates are copied to contiguous memory, because the bits of silu depend on the place of an element in
the part that torch computes at once. So the bits do not depend on the number of heads in a row, if
the number of rows is a multiple of 16.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalizes the last dimension of x. The result has the dtype of x.

    The mean of squares is computed in fp32, because bfloat16 is too inexact for a long sum. If the
    weights are fp32 and x is not, the multiplication by the weights is in fp32 too, and only the
    final result is rounded.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype != x.dtype:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu,
) -> torch.Tensor:
    """Returns rms_norm(x) * activation(gate), in the dtype of x. Gated DeltaNet ends with it, where
    the last dimension is one head, and Kimi Delta Attention with a sigmoid."""
    normed = rms_norm(x, weight.to(x.dtype), eps)
    return (normed * activation(gate.float().contiguous())).to(x.dtype)


def rms_norm_of_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """Returns rms_norm(x * silu(gate)), in the dtype of x. Mamba 2 ends with it. The mean of
    squares is over groups of `group_size` consecutive elements."""
    gated = x.float() * silu(gate.float().contiguous())
    groups = gated.view(*gated.shape[:-1], -1, group_size)
    scale = groups.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (groups * scale).flatten(-2).to(x.dtype) * weight.to(x.dtype)
