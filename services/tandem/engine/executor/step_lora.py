"""Adds to a step's products what its adapters give them, on torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from tandem.engine.executor.lora_weights import LoraWeights, Parts
from tandem_kernels.lora import Product, add_lora

ProductName = Literal["qkv", "attention_out", "gate_up", "down"]


class AddsLora(Protocol):
    """This adds to a step's products what its adapters give them."""

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor: ...


class StepLora:
    """Adds to products; does nothing in a step without adapters."""

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        adapters: Mapping[str, LoraWeights],
        linear: Product,
        row_multiple: int = 1,
    ) -> None:
        """`rows` are those of each adapter, by digest; `linear` is the base products'."""
        self._adapted = [(of_one, adapters[digest]) for digest, of_one in rows.items()]
        self._linear = linear
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


NO_LORA = StepLora({}, {}, torch.nn.functional.linear)
