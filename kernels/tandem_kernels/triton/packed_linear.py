"""Linear layers with quantized integer weights:

    y = x W^T + b      w = (number - zero) * scale + min

A group of consecutive inputs shares a scale, a zero and a min. Weights are dequantized to the dtype
of x in registers, one tile at a time. Sums are fp32.
"""

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import product

_ROWS = 16  # minimum rows of a tile, required by tensor cores
_MANY_ROWS = 64
_INPUTS_MIN, _INPUTS_MAX = 32, 64  # least and most inputs of a tile; they are all in one group


def can_multiply(num_in: int, num_groups: int) -> bool:
    """Returns whether the kernel supports matrices with this number of inputs and of groups."""
    size = num_in // num_groups
    return num_groups == 1 or size % _INPUTS_MAX == 0 or size == _INPUTS_MIN


def packed_linear(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    mins: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns x W^T + b, [rows, out], for x [rows, in].

    numbers               int8 [out, in], or uint8 [out, in / 2]: byte i has the numbers of input
                          2 i in the low nibble and of input 2 i + 1 in the high nibble
    scales, zeros, mins   [out, groups]; zeros and mins may be None, which means 0
    """
    num_rows, num_in = x.shape
    num_out, num_groups = scales.shape
    assert x.stride(1) == 1
    assert all(part is None or part.is_contiguous() for part in (numbers, scales, zeros, mins))
    group_size = num_in // num_groups
    is_large = num_rows > _ROWS
    rows, columns = (_MANY_ROWS, 64) if is_large else (_ROWS, 32)
    out = x.new_empty(num_rows, num_out)
    _packed_linear[(triton.cdiv(num_out, columns), triton.cdiv(num_rows, rows))](
        x,
        numbers,
        scales,
        numbers if zeros is None else zeros,
        scales if mins is None else mins,
        scales if bias is None else bias,
        out,
        num_rows,
        x.stride(0),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        NUM_GROUPS=num_groups,
        HAS_NIBBLES=numbers.dtype == torch.uint8,
        HAS_ZEROS=zeros is not None,
        HAS_MINS=mins is not None,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        INPUTS=_INPUTS_MIN if group_size == _INPUTS_MIN else _INPUTS_MAX,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _packed_linear(
    x,
    numbers,
    scales,
    zeros,
    mins,
    bias,
    out,
    num_rows,
    stride_row,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_NIBBLES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_column = columns < NUM_OUT
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < num_rows
    inputs = tl.arange(0, INPUTS)
    GROUP_SIZE: tl.constexpr = NUM_IN // NUM_GROUPS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, NUM_IN, INPUTS):
        at = first + inputs
        a = tl.load(
            x + rows[:, None] * stride_row + at[None, :],
            mask=is_row[:, None] & (at < NUM_IN)[None, :],
            other=0.0,
        )
        if HAS_NIBBLES:
            HALF: tl.constexpr = INPUTS // 2
            byte = first // 2 + tl.arange(0, HALF)
            packed = tl.load(
                numbers + columns[None, :] * (NUM_IN // 2) + byte[:, None],
                mask=is_column[None, :] & (byte < NUM_IN // 2)[:, None],
                other=0,
            )
            both = tl.join(packed & 15, packed >> 4)  # [half, columns, 2]
            number = both.permute(0, 2, 1).reshape(INPUTS, COLUMNS).to(tl.float32)
        else:
            number = tl.load(
                numbers + columns[None, :] * NUM_IN + at[:, None],
                mask=is_column[None, :] & (at < NUM_IN)[:, None],
                other=0,
            ).to(tl.float32)
        group = columns * NUM_GROUPS + first // GROUP_SIZE
        if HAS_ZEROS:
            zero = tl.load(zeros + group, mask=is_column, other=0).to(tl.float32)
            number -= zero[None, :]
        scale = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
        weight = number * scale[None, :]
        if HAS_MINS:
            least = tl.load(mins + group, mask=is_column, other=0.0).to(tl.float32)
            weight += least[None, :]
        sums += product(a, weight.to(a.dtype))
    if HAS_BIAS:
        each = tl.load(bias + columns, mask=is_column, other=0.0)
        sums += each.to(tl.float32)[None, :]
    places = out + rows[:, None] * NUM_OUT + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
