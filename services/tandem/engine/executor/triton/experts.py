"""Computes a layer's experts with the Triton kernels. A single launch computes the gate and up
product of all experts, and another launch the down product of all experts. Quantized weights are
dequantized inside the products, for the chosen experts only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch

from tandem.engine.executor.triton.products import packed_weight
from tandem.engine.executor.weights.decoder_weights import (
    ExpertWeights,
    Linear,
    Quantized,
    joined,
)
from tandem.engine.executor.weights.expand import pieces
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import GgufBlocks
from tandem_kernels.triton.grouped_linear import (
    ExpertTiles,
    grouped_linear,
    mix,
    tile_by_expert,
)
from tandem_kernels.triton.weight_tiles import PackedWeight


class Stack(NamedTuple):
    """The matrices of all experts of a layer for one product: gate and up, or down."""

    weight: PackedWeight  # [experts * out, in]
    bias: torch.Tensor | None  # [experts, out]
    # int32 [in]: input order[p] is number p of a row of x. None: x keeps its order.
    order: torch.Tensor | None

    @classmethod
    def of(cls, matrices: Sequence[Sequence[Linear]]) -> Self:
        """Creates the stack from the matrices of each expert. Weights are copied if they are
        quantized, or if they are not consecutive in memory. Quantized weights are dequantized if
        the kernels do not read their format, or if the matrices have different formats."""
        biases = [[p.bias for p in parts if p.bias is not None] for parts in matrices]
        bias = _stacked(biases) if biases[0] else None
        every = [part for parts in matrices for part in parts]
        quantized = [_kernel_form(part.blocks) for part in every if part.blocks is not None]
        blocks = joined(quantized) if len(quantized) == len(every) else None
        packed = None if blocks is None else packed_weight(blocks)
        if packed is not None:
            return cls(packed, bias, blocks.order if isinstance(blocks, PackedGroups) else None)
        weight = _stacked([[_dense(part) for part in parts] for parts in matrices])
        return cls(PackedWeight("plain", weight.flatten(0, 1)), bias, None)

    def multiply(self, x: torch.Tensor, tiles: ExpertTiles) -> torch.Tensor:
        """Returns the products of all slots, [slots, out] (see `grouped_linear`)."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        return grouped_linear(x, self.weight, self.bias, tiles)


class StackedExperts(NamedTuple):
    gate_up: Stack
    down: Stack
    num: int
    num_inner: int  # number of inputs of the down product

    @classmethod
    def of(cls, weights: ExpertWeights) -> Self:
        return cls(
            Stack.of([mlp.gate_up for mlp in weights.mlps]),
            Stack.of([(mlp.down,) for mlp in weights.mlps]),
            len(weights.mlps),
            weights.mlps[0].down.weight.shape[1],
        )

    def mix(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        gated: Callable[[torch.Tensor], torch.Tensor],
        shared: torch.Tensor | None,
        first: int = 0,
        num_all: int | None = None,
    ) -> torch.Tensor:
        """Returns, for each row of x, the weighted sum of the outputs of the experts chosen for the
        row, plus `shared` [T, hidden]: [T, hidden] in the dtype of x.

        With `num_all`, these are the experts from number `first` on of a layer with `num_all`
        experts, and others add nothing.

        `chosen` [T, top_k] has the numbers of the chosen experts, and `shares` [T, top_k] the
        weights of the experts' outputs in the sum. `gated` computes the activation, such as
        silu(gate) * up, from gate and up side by side.
        """
        if num_all is not None:
            is_own = (chosen >= first) & (chosen < first + self.num)
            shares = torch.where(is_own, shares, 0.0)
        tiles = tile_by_expert(chosen, self.num, first, num_all)
        inner = gated(self.gate_up.multiply(x, tiles))
        return mix(self.down.multiply(inner, tiles), shares, shared)


def _kernel_form(blocks: Quantized) -> Quantized:
    """Converts GGUF blocks to the format that the kernels read."""
    return PackedGroups.of_blocks(blocks) if isinstance(blocks, GgufBlocks) else blocks


def _dense(matrix: Linear) -> torch.Tensor:
    return torch.cat([weight for weight, _ in pieces(matrix)]) if matrix.blocks else matrix.weight


def _stacked(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Returns one tensor with the matrices of all experts. If weights/experts.py has created
    `parts` as consecutive views of one tensor, the result is a view of that tensor. Otherwise the
    matrices are copied."""
    first = parts[0][0]
    num_bytes = first.numel() * first.element_size()
    storage = first.untyped_storage().data_ptr()
    if all(
        len(each) == 1
        and each[0].untyped_storage().data_ptr() == storage
        and each[0].data_ptr() == first.data_ptr() + i * num_bytes
        for i, each in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([torch.cat(list(each)) for each in parts])
