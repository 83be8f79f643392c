"""Root mean square normalization: y = x / sqrt(mean(x^2) + eps) * weight  (arXiv:1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalizes the last dimension of x, in x's dtype.

    The mean of squares is taken in fp32: in bfloat16 it would lose most of its digits. Weights of
    another dtype than x's are fp32, and the product with them is rounded once.
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype != x.dtype:
        return (wide * scale * weight).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight
