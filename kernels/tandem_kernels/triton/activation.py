"""The gated activation of Llama's MLP: silu(gate) * up  (SwiGLU, arXiv:2002.05202)."""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns [T, inner] from [T, 2 * inner], gate and up side by side; in fp32, same dtype."""
    num_rows, width = gate_up.shape
    assert gate_up.stride(1) == 1
    assert width % 2 == 0
    out = gate_up.new_empty(num_rows, width // 2)
    _silu_mul[(num_rows, triton.cdiv(width // 2, _COLUMNS))](
        gate_up, out, gate_up.stride(0), INNER=width // 2, COLUMNS=_COLUMNS
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, stride_row, INNER: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    dtype: tl.constexpr = out.dtype.element_ty
    places = gate_up + row * stride_row + columns
    gate = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(places + INNER, mask=is_column, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)  # rounded where the reference rounds
    tl.store(out + row * INNER + columns, (silu * up).to(dtype), mask=is_column)
