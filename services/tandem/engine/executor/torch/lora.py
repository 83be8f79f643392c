"""Adds the LoRA deltas of a step's adapters to the model's products, with torch operators."""

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

ProductName = Literal[
    "qkv",
    "q_out",
    "attention_out",
    "attention_gate",
    "gate_up",
    "down",
    "decay_out",
    "gate_out",
]
HeadsName = Literal["latent_keys", "latent_values"]


class AddsLora(Protocol):
    """Adds the LoRA deltas of a step's adapters to the model's products."""

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor: ...

    def add_of_heads(
        self, index: int, product: HeadsName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor: ...


class StepLora:
    """Adds the LoRA deltas of a step with torch operators. Adds nothing if `rows` is empty."""

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        adapters: Mapping[str, LoraWeights],
        linear: Product,
        row_multiple: int = 1,
        linear_of_heads: ProductOfHeads = linear_of_heads,
    ) -> None:
        """`rows` maps an adapter's digest to the rows that use the adapter. `linear` and
        `linear_of_heads` are the functions that also compute the model's own products."""
        self._adapted = [(of_one, adapters[digest]) for digest, of_one in rows.items()]
        self._linear = linear
        self._linear_of_heads = linear_of_heads
        self._row_multiple = row_multiple

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Adds the adapters' deltas to `out` in place and returns `out`. The model has computed
        `out` from the input `x` in layer `index`."""
        for rows, weights in self._adapted:
            parts: Parts = getattr(weights.layers[index], product)
            if parts:
                add_lora(out, x, rows, parts, self._linear, self._row_multiple)
        return out

    def add_of_heads(
        self, index: int, product: HeadsName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Adds deltas like `add`, but to a product that has one matrix per head. `out` is [rows,
        heads, columns]."""
        for rows, weights in self._adapted:
            heads: LoraHeads | None = getattr(weights.layers[index], product)
            if heads is not None:
                add_lora_of_heads(out, x, rows, heads, self._linear_of_heads, self._row_multiple)
        return out


NO_LORA = StepLora({}, {}, torch.nn.functional.linear)
