"""Linear layers with weights that stay quantized in memory: y = x W^T + b.

`weight_tiles.py` has the forms of weights and the inner loop. If a product has too few tiles of
outputs for the multiprocessors, its inputs are cut into splits: one launch computes the sums of
each split, and another one adds them up, in the order of the splits.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.tuning import device_name, num_multiprocessors, tuned
from tandem_kernels.triton.weight_tiles import PackedWeight, multiply

# Rows of a tile: the smallest one that has all rows, or else the largest.
_TILE_ROWS = (16, 32, 64, 128)
_SPLIT_INPUTS = 256  # the inputs of a split are a multiple of this
_SPLIT_INPUTS_MIN = 512
_SPLITS_MAX = 16
_TILE_COLUMNS = 64  # columns of a tile, from which the number of splits is computed
_PROGRAMS_PER_MULTIPROCESSOR = 2
_ADDED_COLUMNS = 1024
_SUMS_PER_WARP_MAX = 2048  # 64 registers of each thread
_INPUTS_OF_FEW_ROWS_MAX = 4096  # inputs x rows; larger tiles of x spill registers


def choose_splits(num_rows: int, num_out: int, num_in: int, multiprocessors: int) -> int:
    """Returns how many splits give each multiprocessor 2 programs, as far as each split has at
    least 512 inputs.

    The number is the same for all numbers of rows that have the same tiles, because the kernel is
    tuned for each size of a split. Products of more than 128 rows have one split.
    """
    if num_rows > _TILE_ROWS[-1]:
        return 1
    tiles: int = triton.cdiv(num_out, _TILE_COLUMNS)
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // tiles
    return max(1, min(wanted, num_in // _SPLIT_INPUTS_MIN, _SPLITS_MAX))


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Returns x W^T + b, [rows, out], for x [rows, in]. If `out` is given, the result is written to
    it; it may be some columns of a wider tensor. `splits` is computed by `choose_splits` if it is
    None."""
    num_rows, num_in = x.shape
    num_out = len(weight.numbers)
    assert num_in == weight.num_in
    assert x.stride(1) == 1
    if out is None:
        out = x.new_empty(num_rows, num_out)
    assert out.stride(1) == 1
    if splits is None:
        splits = choose_splits(num_rows, num_out, num_in, num_multiprocessors(x.device))
    per_split = triton.cdiv(triton.cdiv(num_in, splits), _SPLIT_INPUTS) * _SPLIT_INPUTS
    splits = triton.cdiv(num_in, per_split)
    sums = x.new_empty(splits, num_rows, num_out, dtype=torch.float32) if splits > 1 else out
    tensors, constants = weight.arguments()

    def grid(config: Mapping[str, Any]) -> tuple[int, int, int]:
        tiles = triton.cdiv(num_out, config["COLUMNS"]), triton.cdiv(num_rows, config["ROWS"])
        return *tiles, splits

    _packed_linear[grid](
        x,
        *tensors,
        out if bias is None else bias,
        sums,
        num_rows,
        num_out,
        num_in,
        per_split,
        x.stride(0),
        sums.stride(-2),
        **constants,
        HAS_BIAS=bias is not None and splits == 1,
        HAS_SPLITS=splits > 1,
        ROWS=_tile_rows(num_rows),
        DEVICE=device_name(x.device),
    )
    if splits > 1:
        _add_splits[(num_rows, triton.cdiv(num_out, _ADDED_COLUMNS))](
            sums,
            out if bias is None else bias,
            out,
            num_out,
            splits,
            sums.stride(0),
            out.stride(0),
            HAS_BIAS=bias is not None,
            COLUMNS=_ADDED_COLUMNS,
        )
    return out


def _tile_rows(num_rows: int) -> int:
    return next((rows for rows in _TILE_ROWS if rows >= num_rows), _TILE_ROWS[-1])


def fits(config: triton.Config, arguments: Mapping[str, Any], arch: int) -> bool:
    """Returns whether a config is worth trying for the rows of a tile: tiles of few rows need many
    inputs at a time, tiles of many rows need registers for their sums."""
    columns, inputs = config.kwargs["COLUMNS"], config.kwargs["INPUTS"]
    rows, warps = arguments["ROWS"], config.num_warps
    if rows <= 32:
        return bool(warps == 4 and inputs * rows <= _INPUTS_OF_FEW_ROWS_MAX)
    return bool(inputs == 64 and columns >= 64 and columns * rows <= _SUMS_PER_WARP_MAX * warps)


CONFIGS = [
    triton.Config({"COLUMNS": columns, "INPUTS": inputs}, num_warps=warps, num_stages=stages)
    for columns, inputs, warps, stages in (
        (64, 64, 4, 4),
        (32, 128, 4, 5),
        (64, 128, 4, 3),
        (64, 256, 4, 3),
        (128, 128, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
    )
]
# Arguments of which each combination of values is tuned.
KEY = ("num_out", "num_in", "FORM", "GROUP", "HAS_MINS", "HAS_BLOCKS", "ROWS")


@tuned(CONFIGS, [*KEY, "per_split"], fits)
@triton.jit(do_not_specialize=["num_rows"])
def _packed_linear(
    x,
    numbers,
    high,
    scales,
    zeros,
    mins,
    block_scales,
    block_mins,
    stride_high,
    stride_groups,
    stride_blocks,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    per_split,
    stride_row,
    stride_out,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_column = columns < num_out
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < num_rows
    split = tl.program_id(2)
    begin = split * per_split
    sums = multiply(
        tl.zeros((ROWS, COLUMNS), tl.float32),
        x + rows[:, None] * stride_row,
        is_row,
        (
            numbers,
            high,
            scales,
            zeros,
            mins,
            block_scales,
            block_mins,
            stride_high,
            stride_groups,
            stride_blocks,
        ),
        columns,
        is_column,
        num_in,
        begin,
        tl.minimum(begin + per_split, num_in) if HAS_SPLITS else num_in,
        FORM,
        GROUP,
        ZERO,
        HAS_ZEROS,
        HAS_MINS,
        HAS_BLOCKS,
        INPUTS,
    )
    if HAS_BIAS:
        each = tl.load(bias + columns, mask=is_column, other=0.0)
        sums += each.to(tl.float32)[None, :]
    first_row = split.to(tl.int64) * num_rows
    places = out + (first_row + rows)[:, None] * stride_out + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["splits", "stride_split"])
def _add_splits(
    sums,
    bias,
    out,
    num_out,
    splits,
    stride_split,
    stride_out,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    total = tl.zeros((COLUMNS,), tl.float32)
    places = sums + row * num_out + columns
    for _ in range(splits):
        total += tl.load(places, mask=is_column, other=0.0)
        places += stride_split
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, total.to(out.dtype.element_ty), mask=is_column)
