"""Adds LoRA deltas to the output of a linear layer, for all adapters of a step in two launches:

    kernel    computes                                     with
    shrink    middle[row, part] = x[row] A^T               A [rank, in] of the row's adapter
    expand    out[row, columns of part] += middle B^T      B [columns, rank] times the scale

A linear layer with fused matrices, such as q, k and v, has one part for each matrix. Rows are
grouped into tiles that use one adapter each (arXiv:2310.18547). Rows without an adapter are in no
tile and do not change. Kernels get the addresses of the matrices, so adapters may have different
ranks and are not copied.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from tandem_kernels.lora import LoraPart
from tandem_kernels.triton.attention_loop import product
from tandem_kernels.triton.tuning import next_power_of_2

NUM_WARPS = 8  # with 4, registers spill
TILE_ROWS = 16  # rows of a tile, required by tensor cores
_INPUTS, _COLUMNS = 128, 64
_RANKS_MAX = 64  # a kernel processes at most this many elements of the rank dimension at once
# Number of fields of a part: address of A, address of B, rank, first column, number of columns.
_FIELDS = tl.constexpr(5)


class LoraTiles(NamedTuple):
    """The rows of a step, grouped by adapter."""

    rows: torch.Tensor  # [tiles * TILE_ROWS] int32: row numbers; -1: padding
    adapters: torch.Tensor  # [tiles] int32: index of each tile's adapter

    @classmethod
    def of(cls, rows: Mapping[int, Sequence[int]], device: torch.device) -> Self:
        """Groups rows into tiles. `rows` maps an adapter's index to the rows that use it."""
        padded, adapters = grouped(rows)
        both = torch.tensor(padded + adapters, dtype=torch.int32).to(device)
        return cls(both[: len(padded)], both[len(padded) :])


def grouped(rows: Mapping[int, Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns the two lists of `LoraTiles`. `rows` maps an adapter's index to the rows that use
    it."""
    padded: list[int] = []
    adapters: list[int] = []
    for adapter, of_one in rows.items():
        padded += [*of_one, *[-1] * (-len(of_one) % TILE_ROWS)]
        adapters += [adapter] * (-(-len(of_one) // TILE_ROWS))
    return padded, adapters


def part_fields(part: LoraPart) -> list[int]:
    """Returns the numbers that describe a part to the kernels. They include addresses, so the
    part's matrices must not be moved or freed."""
    assert part.a.is_contiguous()
    assert part.b.is_contiguous()
    num_columns, rank = part.b.shape
    return [part.a.data_ptr(), part.b.data_ptr(), rank, part.first, num_columns]


NO_PART = [0] * _FIELDS.value  # describes a part that an adapter does not change


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    tiles: LoraTiles,
    parts: torch.Tensor,
    *,
    rank_max: int,
    columns_max: int,
) -> None:
    """Adds the adapters' deltas to `out` [T, columns], which is the output of a linear layer for
    `x` [T, in]. All matrices have the dtype of x.

    parts        [adapters, parts, 5] int64: results of part_fields, or NO_PART; the stride of the
                 first dimension may be larger
    rank_max     largest rank of a part
    columns_max  largest number of columns of a part
    """
    assert out.dtype == x.dtype
    assert x.stride(1) == out.stride(1) == parts.stride(2) == 1
    num_parts = parts.shape[1]
    assert parts.shape[2] == parts.stride(1) == _FIELDS.value
    ranks = min(_RANKS_MAX, max(16, next_power_of_2(rank_max)))
    num_tiles = len(tiles.adapters)
    middle = x.new_empty(num_tiles * TILE_ROWS, num_parts, rank_max, dtype=torch.float32)
    _shrink[(num_tiles, num_parts, triton.cdiv(rank_max, ranks))](
        x,
        middle,
        parts,
        tiles.rows,
        tiles.adapters,
        x.shape[1],
        rank_max,
        x.stride(0),
        parts.stride(0),
        ROWS=TILE_ROWS,
        RANKS=ranks,
        INPUTS=_INPUTS,
        num_warps=NUM_WARPS,
    )
    _expand[(num_tiles, num_parts, triton.cdiv(columns_max, _COLUMNS))](
        out,
        middle,
        parts,
        tiles.rows,
        tiles.adapters,
        rank_max,
        out.stride(0),
        parts.stride(0),
        ROWS=TILE_ROWS,
        RANKS=ranks,
        COLUMNS=_COLUMNS,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["rank_max"], do_not_specialize_on_alignment=["parts", "adapters"])
def _shrink(
    x,
    middle,
    parts,
    rows,
    adapters,
    num_in,
    rank_max,
    stride_row,
    stride_adapter,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    ranks = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    fields = parts + tl.load(adapters + tile) * stride_adapter + part * _FIELDS
    rank = tl.load(fields + 2)
    if tl.program_id(2) * RANKS < rank:
        places = tile * ROWS + tl.arange(0, ROWS)
        row_ids = tl.load(rows + places).to(tl.int64)
        is_row = row_ids >= 0
        is_rank = ranks < rank
        inputs = tl.arange(0, INPUTS)
        row_at = x + row_ids[:, None] * stride_row
        a_at = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty)) + ranks[None, :] * num_in
        sums = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(0, num_in, INPUTS):
            at = first + inputs
            is_input = at < num_in
            each = tl.load(
                row_at + at[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            a = tl.load(a_at + at[:, None], mask=is_rank[None, :] & is_input[:, None], other=0.0)
            sums += product(each, a)
        at = (places * tl.num_programs(1) + part) * rank_max
        tl.store(middle + at[:, None] + ranks[None, :], sums, mask=is_rank[None, :])


@triton.jit(do_not_specialize=["rank_max"], do_not_specialize_on_alignment=["parts", "adapters"])
def _expand(
    out,
    middle,
    parts,
    rows,
    adapters,
    rank_max,
    stride_row,
    stride_adapter,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    fields = parts + tl.load(adapters + tile) * stride_adapter + part * _FIELDS
    rank = tl.load(fields + 2)
    num_columns = tl.load(fields + 4)
    if (rank > 0) & (tl.program_id(2) * COLUMNS < num_columns):
        places = tile * ROWS + tl.arange(0, ROWS)
        row_ids = tl.load(rows + places).to(tl.int64)
        is_column = columns < num_columns
        middle_at = middle + ((places * tl.num_programs(1) + part) * rank_max)[:, None]
        b_at = tl.load(fields + 1).to(tl.pointer_type(dtype)) + columns[None, :] * rank
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, rank, RANKS):
            ranks = first + tl.arange(0, RANKS)
            is_rank = ranks < rank
            inner = tl.load(middle_at + ranks[None, :], mask=is_rank[None, :], other=0.0)
            b = tl.load(
                b_at + ranks[:, None], mask=is_rank[:, None] & is_column[None, :], other=0.0
            )
            sums += product(inner.to(dtype), b)
        out_at = out + row_ids[:, None] * stride_row + tl.load(fields + 3) + columns[None, :]
        is_element = (row_ids >= 0)[:, None] & is_column[None, :]
        total = tl.load(out_at, mask=is_element, other=0.0).to(tl.float32) + sums
        tl.store(out_at, total.to(dtype), mask=is_element)
