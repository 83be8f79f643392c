"""Computes a layer's experts with the Triton kernels. A single launch computes the gate and up
product of all experts, and another launch the down product of all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Self

import torch

from tandem.engine.executor.weights.decoder_weights import ExpertWeights, Linear
from tandem.engine.executor.weights.expand import pieces
from tandem_kernels.triton.grouped_linear import grouped_linear, tile_by_expert


class Stack(NamedTuple):
    """The matrices of all experts of a layer for one product: gate and up, or down."""

    # The weights of all experts, [experts, out, in]; None if the weights are quantized.
    weight: torch.Tensor | None
    bias: torch.Tensor | None  # [experts, out]
    # The quantized matrices of each expert; empty if the weights are not quantized.
    parts: Sequence[Sequence[Linear]]

    @classmethod
    def of(cls, matrices: Sequence[Sequence[Linear]]) -> Self:
        """Creates the stack from the matrices of each expert."""
        biases = [[p.bias for p in parts if p.bias is not None] for parts in matrices]
        bias = _stacked(biases) if biases[0] else None
        if matrices[0][0].blocks is not None:
            return cls(None, bias, matrices)
        weight = _stacked([[part.weight for part in parts] for parts in matrices])
        return cls(weight, bias, ())

    def numbers(self) -> torch.Tensor:
        """Returns the weights [experts, out, in]. Each call dequantizes quantized weights again."""
        if self.weight is not None:
            return self.weight
        made: torch.Tensor | None = None
        for expert, parts in enumerate(self.parts):
            first = 0
            for weight, _ in chain.from_iterable(map(pieces, parts)):
                if made is None:
                    num_out = sum(len(part.weight) for part in parts)
                    made = weight.new_empty(len(self.parts), num_out, weight.shape[1])
                made[expert, first : first + len(weight)] = weight
                first += len(weight)
        assert made is not None
        return made


class StackedExperts(NamedTuple):
    gate_up: Stack
    down: Stack
    num: int

    @classmethod
    def of(cls, weights: ExpertWeights) -> Self:
        return cls(
            Stack.of([mlp.gate_up for mlp in weights.mlps]),
            Stack.of([(mlp.down,) for mlp in weights.mlps]),
            len(weights.mlps),
        )

    def mix(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        gated: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Returns, for each row of x, the weighted sum of the outputs of the experts chosen for the
        row: fp32 [T, hidden].

        `chosen` [T, top_k] has the numbers of the chosen experts, and `shares` [T, top_k] the
        weights of the experts' outputs in the sum. `gated` computes the activation, such as
        silu(gate) * up, from gate and up side by side.
        """
        tiles = tile_by_expert(chosen, self.num)
        inner = gated(grouped_linear(x, self.gate_up.numbers(), self.gate_up.bias, tiles))
        parts = grouped_linear(inner, self.down.numbers(), self.down.bias, tiles)
        parts = parts.view(*chosen.shape, -1)
        return (parts * shares.unsqueeze(-1)).sum(1)


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
