"""Computes LoRA adapters with the Triton kernels. For each product, such as qkv, two launches add
the deltas of all adapters of a step.

The per-head products of latent attention use torch, one adapter after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch.nn.functional import linear

from tandem.engine.executor.torch.lora import NO_LORA, AddsLora, ProductName, StepLora
from tandem.engine.executor.weights.lora import LoraLayer, LoraWeights
from tandem_kernels.triton.lora import NO_PART, LoraTiles, add_lora, part_fields

_PRODUCTS: tuple[ProductName, ...] = get_args(ProductName)
_PARTS_MAX = 3  # largest number of matrices in one fused product; q, k and v are 3 matrices


class TritonAdapters:
    """The loaded adapters, and a table with the addresses of their matrices for the kernels."""

    def __init__(
        self, device: torch.device, *, num_layers: int, num_max: int, rank_max: int
    ) -> None:
        """At most `num_max` adapters, with ranks of at most `rank_max`, are loaded at a time."""
        self._device = device
        self._rank_max = rank_max
        self._weights: dict[str, LoraWeights] = {}
        # The number of each loaded adapter, by its digest. Number 0 is an adapter that changes
        # nothing. An adapter keeps its number, because a step that has been launched may use it.
        self.numbers: dict[str, int] = {}
        self._free = list(range(num_max, 0, -1))
        # Five numbers, which are addresses and sizes, for each matrix of the adapters:
        # [1 + adapters, layers, products, matrices, 5]. Graphs record the address of this table.
        self._fields = torch.zeros(
            1 + num_max, num_layers, len(_PRODUCTS), _PARTS_MAX, len(NO_PART), dtype=torch.int64
        ).to(device)
        # One dict per layer: product -> (highest rank of the loaded adapters, largest number of
        # output columns of their matrices).
        self._sizes: list[dict[ProductName, tuple[int, int]]] = []

    def add(self, weights: LoraWeights) -> None:
        """Makes an adapter available to later steps. A step names an adapter by the adapter's
        digest."""
        self.drop(weights.digest)
        self._weights[weights.digest] = weights
        self.numbers[weights.digest] = number = self._free.pop()
        fields = [_fields(layer) for layer in weights.layers]
        self._fields[number] = torch.tensor(fields, dtype=torch.int64).to(self._device)
        self._measure()

    def drop(self, digest: str) -> None:
        """Removes an adapter that no later step uses."""
        if self._weights.pop(digest, None) is not None:
            number = self.numbers.pop(digest)
            self._fields[number] = 0
            self._free.append(number)
            self._measure()

    def of_step(self, rows: Mapping[str, Sequence[int]]) -> AddsLora:
        """Returns an object that adds the LoRA deltas of one step. `rows` maps an adapter's digest
        to the rows that use the adapter."""
        if not rows:
            return NO_LORA
        by_number = {self.numbers[digest]: of_one for digest, of_one in rows.items()}
        tiles = LoraTiles.of(by_number, self._device)
        return _TritonStepLora(tiles, self._fields, self._sizes, self._of_heads(rows))

    def of_any_step(self, tiles: LoraTiles) -> AddsLora:
        """Returns an object that adds the LoRA deltas of any step whose rows are in `tiles`, for a
        graph: adapters that are loaded later may change other products. The model has no latent
        attention."""
        return _LoraOfAnyStep(tiles, self._fields, self._rank_max)

    def _of_heads(self, rows: Mapping[str, Sequence[int]]) -> StepLora:
        """Returns an object that adds the LoRA deltas to the products with one matrix per head."""
        on_device = {
            digest: torch.tensor(of_one, dtype=torch.int64).to(self._device)
            for digest, of_one in rows.items()
            if any(layer.latent_keys for layer in self._weights[digest].layers)
        }
        return StepLora(on_device, self._weights, linear) if on_device else NO_LORA

    def _measure(self) -> None:
        layers = zip(*(adapter.layers for adapter in self._weights.values()), strict=True)
        self._sizes = [
            {name: sizes for name in _PRODUCTS if (sizes := _largest(of_all, name))}
            for of_all in layers
        ]


class _TritonStepLora:
    def __init__(
        self,
        tiles: LoraTiles,
        fields: torch.Tensor,
        sizes: Sequence[Mapping[ProductName, tuple[int, int]]],
        of_heads: StepLora,
    ) -> None:
        self._tiles = tiles
        self._fields = fields
        self._sizes = sizes
        self.add_of_heads = of_heads.add_of_heads

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Adds the adapters' deltas to `out` in place and returns `out`. The model has computed
        `out` from the input `x` in layer `index`."""
        if (sizes := self._sizes[index].get(product)) is not None:
            parts = self._fields[:, index, _PRODUCTS.index(product)]
            rank, columns = sizes
            add_lora(out, x, self._tiles, parts, rank_max=rank, columns_max=columns)
        return out


class _LoraOfAnyStep:
    def __init__(self, tiles: LoraTiles, fields: torch.Tensor, rank_max: int) -> None:
        self._tiles = tiles
        self._fields = fields
        self._rank_max = rank_max
        self.add_of_heads = NO_LORA.add_of_heads

    def add(
        self, index: int, product: ProductName, out: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Adds deltas as `_TritonStepLora.add` does. Where no adapter has a matrix, the kernels end
        at once."""
        parts = self._fields[:, index, _PRODUCTS.index(product)]
        columns = out.shape[1]
        add_lora(out, x, self._tiles, parts, rank_max=self._rank_max, columns_max=columns)
        return out


def _fields(layer: LoraLayer) -> list[list[list[int]]]:
    """Returns the addresses and sizes of an adapter's matrices for one layer, as [products][3][5]
    numbers. Each product has room for three matrices, and each matrix has five numbers."""
    products = []
    for name in _PRODUCTS:
        parts = [part_fields(part) for part in getattr(layer, name)]
        products.append(parts + [NO_PART] * (_PARTS_MAX - len(parts)))
    return products


def _largest(layers: Sequence[LoraLayer], product: ProductName) -> tuple[int, int] | None:
    """Returns the highest rank and the largest number of output columns of the LoRA matrices for a
    product. `layers` has the same layer of each adapter. Returns None if no adapter changes the
    product."""
    shapes = [part.b.shape for layer in layers for part in getattr(layer, product)]
    if not shapes:
        return None
    return max(rank for _, rank in shapes), max(columns for columns, _ in shapes)
