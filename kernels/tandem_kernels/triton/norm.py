"""Fuses residual addition and RMSNorm (arXiv:1910.07467).

    norm(x) = x / sqrt(mean(x^2) + eps) * weight

    x += multiplier * norm(delta);  y = norm(x)

Each norm has its own weights. Either norm may be left out.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import next_power_of_2


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the normalized rows of x [T, hidden] in the dtype of x. Computes in fp32. The rows of
    x may be strided. If `out` is given, the result is written to it; it may be x."""
    out = x.new_empty(x.shape) if out is None else out
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    delta_weight: torch.Tensor | None = None,
    delta_multiplier: float = 1.0,
) -> torch.Tensor:
    """Adds `delta` [T, hidden] to x in place. Returns the normalized rows of the sum in the dtype
    of x, or x itself if `weight` is None.

    delta_weight      weights of a norm of `delta` before the addition; None: no norm
    delta_multiplier  factor of `delta`, after its norm
    """
    assert delta.shape == x.shape
    out = x if weight is None else x.new_empty(x.shape)
    _launch(x, delta, weight, out, eps, delta_weight, delta_multiplier)
    return out


def num_warps(columns: int) -> int:
    """Returns the number of warps for rows of `columns` columns."""
    return min(16, max(1, columns // 512))


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    delta_weight: torch.Tensor | None = None,
    delta_multiplier: float = 1.0,
) -> None:
    num_rows, hidden = x.shape
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    columns = next_power_of_2(hidden)
    _add_rms_norm[(num_rows,)](
        x,
        delta,
        delta_weight,
        weight,
        out,
        eps,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        COLUMNS=columns,
        HAS_DELTA=delta is not None,
        HAS_DELTA_NORM=delta_weight is not None,
        DELTA_MULTIPLIER=delta_multiplier,
        HAS_NORM=weight is not None,
        num_warps=num_warps(columns),
    )


@triton.jit
def _add_rms_norm(
    x,
    delta,
    delta_weight,
    weight,
    out,
    eps,
    stride_x,
    stride_delta,
    stride_out,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    DELTA_MULTIPLIER: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * stride_x + columns, mask=is_column, other=0.0).to(tl.float32)
    # Results are rounded to the dtype of x wherever the torch code rounds them.
    if HAS_DELTA:
        added = tl.load(delta + row * stride_delta + columns, mask=is_column, other=0.0)
        added = added.to(tl.float32)
        if HAS_DELTA_NORM:
            added = normalized(added, delta_weight, eps, columns, is_column, HIDDEN, dtype)
            added = added.to(dtype).to(tl.float32)
        if DELTA_MULTIPLIER != 1.0:
            added = (added * DELTA_MULTIPLIER).to(dtype).to(tl.float32)
        total = (values + added).to(dtype)
        tl.store(x + row * stride_x + columns, total, mask=is_column)
        values = total.to(tl.float32)
    if HAS_NORM:
        normed = normalized(values, weight, eps, columns, is_column, HIDDEN, dtype)
        tl.store(out + row * stride_out + columns, normed.to(dtype), mask=is_column)


@triton.jit
def normalized(values, weight, eps, columns, is_column, HIDDEN: tl.constexpr, dtype: tl.constexpr):
    """Returns an fp32 row after RMSNorm, in fp32."""
    factor = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = values * factor
    # If the weights have the dtype of x, the torch code rounds `normed` before it multiplies by the
    # weights.
    if weight.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weights
