"""Linear layers of mixture-of-experts: y[s] = x[s // d] W[e(s)]^T + b[e(s)].

A slot s is a pair of a token and one of the token's chosen experts, whose number is e(s). With
top_k = 2, slots 0 and 1 belong to token 0, slots 2 and 3 to token 1, and so on. For the gate and up
matrices d is top_k, because all slots of a token have the same input. For the down matrices d is 1.

Slots are sorted by expert and grouped into tiles of one expert each. The number of tiles depends
only on the numbers of tokens and experts, not on which experts are chosen. So the host does not
wait for the device, and a CUDA graph can record the operation.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.attention_loop import product

_ROWS = 16  # minimum rows of a tile, required by tensor cores
_MANY_ROWS = 64  # rows of a tile if experts have many slots
_COLUMNS, _INPUTS = 64, 64


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The slots of a step, grouped into tiles. A slot is a pair of a token and one of its chosen
    experts. All slots of a tile have the same expert."""

    tile_rows: int
    slots: torch.Tensor  # [tiles * tile_rows] int32: slot numbers; -1: padding
    experts: torch.Tensor  # [tiles] int32: expert of each tile; `num_experts`: a tile without slots
    num_slots: int
    num_experts: int


def tile_by_expert(chosen: torch.Tensor, num_experts: int) -> ExpertTiles:
    """Groups the slots into tiles. `chosen` [T, top_k] has the experts of each token."""
    experts = chosen.flatten()
    num_slots, device = len(experts), chosen.device
    tile_rows = _ROWS if num_slots <= _ROWS * num_experts else _MANY_ROWS
    num_tiles = num_slots // tile_rows + min(num_slots, num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    padded = (counts + tile_rows - 1) // tile_rows * tile_rows
    ends = padded.cumsum(0)
    order = experts.argsort(stable=True)
    in_order = experts[order]
    within = torch.arange(num_slots, device=device) - (counts.cumsum(0) - counts)[in_order]
    slots = torch.full((num_tiles * tile_rows,), -1, dtype=torch.int32, device=device)
    slots[(ends - padded)[in_order] + within] = order.int()
    firsts = torch.arange(num_tiles, device=device) * tile_rows
    tile_experts = torch.searchsorted(ends, firsts, right=True).int()
    return ExpertTiles(tile_rows, slots, tile_experts, num_slots, num_experts)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: ExpertTiles
) -> torch.Tensor:
    """Returns the layer's output for all slots, [slots, out]. `x` is [slots / d, in], where d slots
    share a row. `weight` is [experts, out, in] and `bias` [experts, out]. Sums are fp32."""
    num_out, num_in = weight.shape[1:]
    assert tiles.num_slots % len(x) == 0
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(tiles.num_slots, num_out)
    _grouped_linear[(len(tiles.experts), triton.cdiv(num_out, _COLUMNS))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tiles.slots,
        tiles.experts,
        x.stride(0),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        NUM_EXPERTS=tiles.num_experts,
        SLOTS_OF_ROW=tiles.num_slots // len(x),
        HAS_BIAS=bias is not None,
        ROWS=tiles.tile_rows,
        COLUMNS=_COLUMNS,
        INPUTS=_INPUTS,
    )
    return out


@triton.jit
def _grouped_linear(
    x,
    weight,
    bias,
    out,
    slots,
    experts,
    stride_row,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SLOTS_OF_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < NUM_EXPERTS:
        row_slots = tl.load(slots + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row_slots >= 0
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < NUM_OUT
        inputs = tl.arange(0, INPUTS)
        rows = x + (row_slots // SLOTS_OF_ROW)[:, None] * stride_row
        matrix = weight + (expert * NUM_OUT + columns)[None, :] * NUM_IN
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, NUM_IN, INPUTS):
            at = first + inputs
            is_input = at < NUM_IN
            a = tl.load(rows + at[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            b = tl.load(
                matrix + at[:, None], mask=is_column[None, :] & is_input[:, None], other=0.0
            )
            sums += product(a, b)
        if HAS_BIAS:
            each = tl.load(bias + expert * NUM_OUT + columns, mask=is_column, other=0.0)
            sums += each.to(tl.float32)[None, :]
        places = out + row_slots[:, None] * NUM_OUT + columns[None, :]
        is_in = is_row[:, None] & is_column[None, :]
        tl.store(places, sums.to(out.dtype.element_ty), mask=is_in)
