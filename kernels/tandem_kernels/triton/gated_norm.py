"""RMSNorm with a gate, after or before the norm (see tandem_kernels/norm.py), or the gate alone."""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.norm import num_warps
from tandem_kernels.triton.tuning import next_power_of_2


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Returns rms_norm(x) * silu(gate) for x [T, heads, d]. `weight` is [d]. Tokens and heads of
    `gate` may be strided."""
    assert gate.stride(2) == 1
    out = x.new_empty(x.shape)
    _launch(x.contiguous(), gate, weight, out, eps, is_gate_first=False)
    return out


def rms_norm_of_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int,
    factor: float = 1.0,
) -> torch.Tensor:
    """Returns rms_norm(x * silu(gate)) * factor for x [T, d], over groups of `group_size` elements.
    `weight` is [d]; None: there is no norm. The rows of `gate` may be strided."""
    groups = x.contiguous().view(len(x), -1, group_size)
    out = torch.empty_like(groups)
    gates = gate.as_strided(groups.shape, (gate.stride(0), group_size, 1), gate.storage_offset())
    _launch(groups, gates, weight, out, eps, is_gate_first=True, factor=factor)
    return out.view(x.shape)


def _launch(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    is_gate_first: bool,
    factor: float = 1.0,
) -> None:
    num_rows, num_groups, size = x.shape
    columns = next_power_of_2(size)
    _gated_norm[(num_rows, num_groups)](
        *(x, gate, weight, out, eps, gate.stride(0), gate.stride(1)),
        SIZE=size,
        COLUMNS=columns,
        NUM_GROUPS=num_groups,
        IS_GATE_FIRST=is_gate_first,
        HAS_NORM=weight is not None,
        FACTOR=factor,
        num_warps=num_warps(columns),
    )


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    eps,
    stride_gate,
    stride_gate_group,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    IS_GATE_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FACTOR: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    at = (row * NUM_GROUPS + group) * SIZE + columns
    values = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
    gates = gate + row * stride_gate + group * stride_gate_group + columns
    gates = tl.load(gates, mask=is_column, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    if IS_GATE_FIRST:
        values *= gates
    # Results are rounded wherever the torch code rounds them.
    if HAS_NORM:
        first_weight = group * SIZE if IS_GATE_FIRST else 0
        weights = tl.load(weight + first_weight + columns, mask=is_column, other=0.0)
        values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        values = (values.to(dtype).to(tl.float32) * weights.to(tl.float32)).to(dtype)
        values = values.to(tl.float32)
    if not IS_GATE_FIRST:
        values *= gates
    if FACTOR != 1.0:
        values = values.to(dtype).to(tl.float32) * FACTOR
    tl.store(out + at, values.to(dtype), mask=is_column)
