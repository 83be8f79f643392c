"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""

import torch


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
