"""Adds the products of a step's adapters to those of the model, on torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from tandem.engine.executor.weights.lora import LoraWeights, Parts
from tandem_kernels.linear import linear_of_heads
from tandem_kernels.lora import (
    LoraHeads,
    Product,
    ProductOfHeads,
    add_lora,
    add_lora_of_heads,
)

ProductName = Literal["qkv", "q_out", "attention_out", "gate_up", "down"]
HeadsName = Literal["latent_keys", "latent_values"]


class AddsLora(Protocol):
    """Adds the products of a step's adapters to the products of the model."""

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor: ...

    def add_of_heads(
        self, index: int, product: HeadsName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor: ...


class StepLora:
    """Adds to products; does nothing in a step without adapters."""

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        adapters: Mapping[str, LoraWeights],
        linear: Product,
        row_multiple: int = 1,
        linear_of_heads: ProductOfHeads = linear_of_heads,
    ) -> None:
        """`rows` are those of each adapter, by digest; `linear` is the base products', and so is
        `linear_of_heads`."""
        self._adapted = [(of_one, adapters[digest]) for digest, of_one in rows.items()]
        self._linear = linear
        self._linear_of_heads = linear_of_heads
        self._row_multiple = row_multiple

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Returns `out`, the product of `x` in a layer, with what the adapters add to it."""
        for rows, weights in self._adapted:
            parts: Parts = getattr(weights.layers[index], product)
            if parts:
                add_lora(out, x, rows, parts, self._linear, self._row_multiple)
        return out

    def add_of_heads(
        self, index: int, product: HeadsName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Does as `add` for a product of heads [rows, heads, columns]."""
        for rows, weights in self._adapted:
            heads: LoraHeads | None = getattr(weights.layers[index], product)
            if heads is not None:
                add_lora_of_heads(out, x, rows, heads, self._linear_of_heads, self._row_multiple)
        return out


NO_LORA = StepLora({}, {}, torch.nn.functional.linear)
