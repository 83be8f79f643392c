"""Fuses residual addition and RMSNorm (arXiv:1910.07467).

x += delta;  y = x / sqrt(mean(x^2) + eps) * weight
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the normalized rows of x [T, hidden] in the dtype of x. Computes in fp32. The rows of
    x may be strided."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds `delta` [T, hidden] to x in place. Returns the normalized rows of the sum in the dtype
    of x."""
    assert delta.shape == x.shape
    return _launch(x, delta, weight, eps)


def num_warps(columns: int) -> int:
    """Returns the number of warps for rows of `columns` columns."""
    return min(16, max(1, columns // 512))


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    num_rows, hidden = x.shape
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    out = x.new_empty(num_rows, hidden)
    columns = next_power_of_2(hidden)
    _add_rms_norm[(num_rows,)](
        x,
        delta,
        weight,
        out,
        eps,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        HIDDEN=hidden,
        COLUMNS=columns,
        HAS_DELTA=delta is not None,
        num_warps=num_warps(columns),
    )
    return out


@triton.jit
def _add_rms_norm(
    x,
    delta,
    weight,
    out,
    eps,
    stride_x,
    stride_delta,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * stride_x + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * stride_delta + columns, mask=is_column, other=0.0)
        total = (values + added.to(tl.float32)).to(dtype)
        tl.store(x + row * stride_x + columns, total, mask=is_column)
        values = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = values * factor
    # If the weights have the dtype of x, the torch code rounds `normed` before it multiplies by the
    # weights. This kernel must give the same result.
    if weight.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + row * HIDDEN + columns, (normed * weights).to(dtype), mask=is_column)
