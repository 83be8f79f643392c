"""Linear layers of mixture-of-experts: y[s] = x[s // d] W[e(s)]^T + b[e(s)].

A slot s is a pair of a token and one of the token's chosen experts, whose number is e(s). With
top_k = 2, slots 0 and 1 belong to token 0, slots 2 and 3 to token 1, and so on. For the gate and up
matrices d is top_k, because all slots of a token have the same input. For the down matrices d is 1.

Slots are sorted by expert and grouped into tiles of one expert each. The number of tiles depends
only on the numbers of tokens and experts, not on which experts are chosen. So the host does not
wait for the device, and a CUDA graph can record the operation. A program reads only the weights of
its tile's expert; weight_tiles.py has their forms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tandem_kernels.triton.packed_linear import CONFIGS, KEY, fits
from tandem_kernels.triton.tuning import device_name, next_power_of_2, tuned
from tandem_kernels.triton.weight_tiles import PackedWeight, multiply

# Rows of a tile: the first number that is at least the slots of an average expert, or the last one.
# Tensor cores need 16.
_TILE_ROWS = (16, 64, 128)
_SORTED_AT_ONCE = 1024  # slots
_MIXED_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The slots of a step, grouped into tiles. A slot is a pair of a token and one of its chosen
    experts. All slots of a tile have the same expert."""

    tile_rows: int
    slots: torch.Tensor  # [tiles * tile_rows] int32: slot numbers; -1: padding
    experts: torch.Tensor  # [tiles] int32: expert of each tile; `num_experts`: a tile without slots
    num_slots: int
    num_experts: int


def tile_by_expert(
    chosen: torch.Tensor, num_experts: int, first: int = 0, num_all: int | None = None
) -> ExpertTiles:
    """Groups the slots into tiles. `chosen` [T, top_k] has the experts of each token. Only slots of
    the `num_experts` experts from number `first` on are in a tile, and these experts are then
    numbered from 0. `num_all` is the number of all experts; None: `num_experts`."""
    experts = chosen.flatten()
    num_slots = len(experts)
    average = num_slots / (num_all or num_experts)
    tile_rows = next((rows for rows in _TILE_ROWS if average <= rows), _TILE_ROWS[-1])
    num_tiles = num_slots // tile_rows + min(num_slots, num_experts)
    slots = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=chosen.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    _tile_by_expert[(num_experts + 1,)](
        experts,
        slots,
        tile_experts,
        num_slots,
        num_tiles,
        first,
        NUM_EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts + 1),
        TILE_ROWS=tile_rows,
        SLOTS=_SORTED_AT_ONCE,
    )
    return ExpertTiles(tile_rows, slots, tile_experts, num_slots, num_experts)


def grouped_linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, tiles: ExpertTiles
) -> torch.Tensor:
    """Returns the layer's output for all slots, [slots, out]. `x` is [slots / d, in], where d slots
    share a row. `weight` has the matrices of all experts, [experts * out, in], and `bias` is
    [experts, out]. Sums are fp32."""
    num_out = len(weight.numbers) // tiles.num_experts
    assert tiles.num_slots % len(x) == 0
    assert x.stride(1) == 1
    assert bias is None or bias.is_contiguous()
    out = x.new_empty(tiles.num_slots, num_out)
    tensors, constants = weight.arguments()

    def grid(config: Mapping[str, Any]) -> tuple[int, int]:
        return len(tiles.experts), triton.cdiv(num_out, config["COLUMNS"])

    _grouped_linear[grid](
        x,
        *tensors,
        out if bias is None else bias,
        out,
        tiles.slots,
        tiles.experts,
        num_out,
        weight.num_in,
        x.stride(0),
        **constants,
        NUM_EXPERTS=tiles.num_experts,
        SLOTS_OF_ROW=tiles.num_slots // len(x),
        HAS_BIAS=bias is not None,
        ROWS=tiles.tile_rows,
        DEVICE=device_name(x.device),
    )
    return out


def mix(parts: torch.Tensor, shares: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Returns the weighted sum of each token's slots, plus `shared` [T, out], in the dtype of
    `parts`. `parts` is [slots, out], and `shares` [T, top_k] has the weights of the slots. Sums
    are fp32."""
    num_tokens, top_k = shares.shape
    num_out = parts.shape[1]
    assert parts.is_contiguous()
    assert shares.is_contiguous()
    assert shared is None or shared.is_contiguous()
    out = parts.new_empty(num_tokens, num_out)
    _mix[(num_tokens, triton.cdiv(num_out, _MIXED_COLUMNS))](
        parts,
        shares,
        parts if shared is None else shared,
        out,
        num_out,
        TOP_K=top_k,
        HAS_SHARED=shared is not None,
        COLUMNS=_MIXED_COLUMNS,
    )
    return out


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "first_expert"])
def _tile_by_expert(
    experts,
    slots,
    tile_experts,
    num_slots,
    num_tiles,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Each program writes the tiles of one expert. Number NUM_EXPERTS, which stands for all experts
    of other ranks, writes the tiles without slots.

    Each program counts the slots of all experts, and so knows where its own tiles begin.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, SLOTS)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_slots, SLOTS):
        is_slot = first + at < num_slots
        chosen = _own_expert(experts + first + at, is_slot, first_expert, NUM_EXPERTS)
        counts += tl.histogram(chosen, BINS)
    tiles = tl.where(bins < NUM_EXPERTS, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(bins == expert, tiles, 0), 0)
    if expert == NUM_EXPERTS:
        end_tile = num_tiles

    placed = first_tile * TILE_ROWS
    if expert < NUM_EXPERTS:
        for first in range(0, num_slots, SLOTS):
            is_slot = first + at < num_slots
            chosen = _own_expert(experts + first + at, is_slot, first_expert, NUM_EXPERTS)
            is_mine = (chosen == expert).to(tl.int32)
            places = placed + tl.cumsum(is_mine, 0) - 1
            tl.store(slots + places, first + at, mask=is_mine > 0)
            placed += tl.sum(is_mine, 0)
    for first in range(placed, end_tile * TILE_ROWS, SLOTS):
        tl.store(slots + first + at, -1, mask=first + at < end_tile * TILE_ROWS)
    for first in range(first_tile, end_tile, SLOTS):
        tl.store(tile_experts + first + at, expert, mask=first + at < end_tile)


@triton.jit
def _own_expert(at, is_slot, first_expert, NUM_EXPERTS: tl.constexpr):
    """Returns the experts of slots, counted from `first_expert`; NUM_EXPERTS for experts of other
    ranks and where there is no slot."""
    expert = tl.load(at, mask=is_slot, other=-1).to(tl.int32) - first_expert
    is_own = is_slot & (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(is_own, expert, NUM_EXPERTS)


@tuned(CONFIGS, [*KEY, "SLOTS_OF_ROW"], fits)
@triton.jit
def _grouped_linear(
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
    slots,
    experts,
    num_out,
    num_in,
    stride_row,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    SLOTS_OF_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEVICE: tl.constexpr,
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
        is_column = columns < num_out
        sums = multiply(
            tl.zeros((ROWS, COLUMNS), tl.float32),
            x + (row_slots // SLOTS_OF_ROW)[:, None] * stride_row,
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
            expert * num_out + columns,
            is_column,
            num_in,
            0,
            num_in,
            FORM,
            GROUP,
            ZERO,
            HAS_ZEROS,
            HAS_MINS,
            HAS_BLOCKS,
            INPUTS,
        )
        if HAS_BIAS:
            each = tl.load(bias + expert * num_out + columns, mask=is_column, other=0.0)
            sums += each.to(tl.float32)[None, :]
        places = out + row_slots[:, None] * num_out + columns[None, :]
        is_in = is_row[:, None] & is_column[None, :]
        tl.store(places, sums.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _mix(
    parts,
    shares,
    shared,
    out,
    num_out,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_out
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        share = tl.load(shares + slot).to(tl.float32)
        # A slot of an expert of another rank has no share, and nothing was written for it.
        num_written = tl.where(share != 0.0, num_out, 0)
        part = tl.load(parts + slot * num_out + columns, mask=columns < num_written, other=0.0)
        total += part.to(tl.float32) * share
    if HAS_SHARED:
        added = tl.load(shared + token * num_out + columns, mask=is_column, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + token * num_out + columns, total.to(out.dtype.element_ty), mask=is_column)
