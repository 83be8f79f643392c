"""Activations of MLPs, with gates (arXiv:2002.05202) and without:

    silu         silu(gate) * up
    gelu_tanh    gelu_tanh(gate) * up
    clamped      gate * sigmoid(alpha * gate) * (up + 1)
    relu2        relu(up)^2

gpt-oss uses the clamped form. It first clamps `gate` to at most `limit`, and clamps `up` to the
range -limit to limit. gelu_tanh(x) is x (1 + tanh(f(x))) / 2, which equals
x sigmoid(2 f(x)), with f(x) = sqrt(2 / pi) (x + 0.044715 x^3).
"""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def gated_mul(
    gate_up: torch.Tensor,
    activation: str = "silu",
    clamp: tuple[float, float] | None = None,
    factors: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Applies the activation to `gate_up` [T, 2 * inner]: the first `inner` columns are `gate`, the
    other columns are `up`. Returns [T, inner] in the same dtype. Computes in fp32.

    activation  silu or gelu_tanh
    clamp       (alpha, limit) of the clamped form, which replaces `activation`
    factors     on the gates, before the activation, and on the results
    """
    assert activation in ("silu", "gelu_tanh")
    num_rows, width = gate_up.shape
    assert gate_up.stride(1) == 1
    assert width % 2 == 0
    out = gate_up.new_empty(num_rows, width // 2)
    _gated_mul[(num_rows, triton.cdiv(width // 2, _COLUMNS))](
        gate_up,
        out,
        gate_up.stride(0),
        INNER=width // 2,
        COLUMNS=_COLUMNS,
        IS_SILU=activation == "silu",
        ALPHA=clamp[0] if clamp else 0.0,
        LIMIT=clamp[1] if clamp else 0.0,
        GATE_FACTOR=factors[0],
        FACTOR=factors[1],
    )
    return out


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x)^2 for x [T, inner], whose rows may be strided, in the same dtype."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    out = x.new_empty(x.shape)
    _relu_squared[(num_rows, triton.cdiv(width, _COLUMNS))](
        x, out, x.stride(0), WIDTH=width, COLUMNS=_COLUMNS
    )
    return out


@triton.jit
def _gated_mul(
    gate_up,
    out,
    stride_row,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SILU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    FACTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < INNER
    dtype: tl.constexpr = out.dtype.element_ty
    places = gate_up + row * stride_row + columns
    gate = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(places + INNER, mask=is_column, other=0.0).to(tl.float32)
    # Rounds wherever the torch code does.
    if GATE_FACTOR != 1.0:
        gate = (gate * GATE_FACTOR).to(dtype).to(tl.float32)
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0
        power = gate * ALPHA
    elif IS_SILU:
        power = gate
    else:
        power = gate * (gate * gate * 0.0713548162726 + 1.5957691216057308)
    active = (gate * tl.sigmoid(power)).to(dtype).to(tl.float32) * up
    if FACTOR != 1.0:
        active = active.to(dtype).to(tl.float32) * FACTOR
    tl.store(out + row * INNER + columns, active.to(dtype), mask=is_column)


@triton.jit
def _relu_squared(x, out, stride_row, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    active = tl.load(x + row * stride_row + columns, mask=is_column, other=0.0).to(tl.float32)
    active = tl.maximum(active, 0.0)
    squares = (active * active).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, squares, mask=is_column)
