"""Packs LoRA adapters for the C++ decoder. An adapter is packed once, when it is loaded. Each step
then gets the addresses of the packed matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import pointer
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from tandem.engine.executor.native.packing import KINDS, HugePages
from tandem.engine.executor.weights.lora import LoraLayer, LoraWeights, Parts
from tandem.engine.scheduler.batch import SequenceSlice
from tandem_kernels.lora import LoraHeads
from tandem_kernels.native import library
from tandem_kernels.native.library import PANEL, Library, Matrix, address, packed_bytes

_PRODUCTS = ("qkv", "attention_out", "gate_up", "down", "q_out", "decay_out", "gate_out")
_HEADS = ("latent_keys", "latent_values")
_LoraLayer = library.LoraLayer


class PackedLora:
    """The packed A and B matrices of one adapter. May be created in any thread."""

    def __init__(self, library: Library, weights: LoraWeights, num_qkv: int) -> None:
        """`num_qkv` is the number of outputs of q, k and v, after which the product of these
        matrices has those of the gates of attention."""
        self._library = library
        self._huge_pages = HugePages()
        self._kept: list[Any] = []  # objects to which C++ has pointers
        self.digest = weights.digest
        # The largest rank of the adapter's products. For example, if the A matrices of q, k and v
        # have 8 rows each, the fused product of q, k and v has rank 24.
        self.rank = 0

        def with_gates(layer: LoraLayer) -> LoraLayer:
            gates = (replace(part, first=num_qkv + part.first) for part in layer.attention_gate)
            return replace(layer, qkv=(*layer.qkv, *gates))

        self.layers = (_LoraLayer * len(weights.layers))(
            *(
                _LoraLayer(
                    *(self._product(getattr(layer, name)) for name in _PRODUCTS),
                    *(self._heads(getattr(layer, name)) for name in _HEADS),
                )
                for layer in map(with_gates, weights.layers)
            )
        )

    def _product(self, parts: Parts) -> library.LoraProduct:
        if not parts:
            return library.LoraProduct()
        ranks = [len(part.a) for part in parts]
        firsts = [0, *accumulate(ranks)]
        self.rank = max(self.rank, firsts[-1])
        a = parts[0].a if len(parts) == 1 else torch.cat([part.a for part in parts])
        matrix = self._matrix(a)  # A is packed before all B, because a step reads A first
        packed = (library.LoraPart * len(parts))(
            *(
                library.LoraPart(self._matrix(part.b), part.first, first)
                for part, first in zip(parts, firsts, strict=False)
            )
        )
        self._kept.append(packed)
        return library.LoraProduct(a=matrix, parts=packed, num_parts=len(parts))

    def _heads(self, heads: LoraHeads | None) -> Any:
        """Packs the A and B matrices of a product that has one matrix per head. Returns None if the
        adapter does not change the product."""
        if heads is None:
            return None
        num_heads, rank, _ = heads.a.shape
        self.rank = max(self.rank, rank)
        parts = (library.LoraPart * num_heads)(
            *(library.LoraPart(matrix, 0, 0) for matrix in self._matrices(heads.b))
        )
        packed = (library.LoraProduct * num_heads)(
            *(
                library.LoraProduct(a=matrix, parts=pointer(part), num_parts=1)
                for matrix, part in zip(self._matrices(heads.a), parts, strict=True)
            )
        )
        self._kept += [parts, packed]
        return packed

    def _matrices(self, weights: torch.Tensor) -> list[Matrix]:
        """Packs the matrix of each head. A matrix that all heads share is packed only once."""
        if weights.stride(0) == 0:
            return [self._matrix(weights[0])] * len(weights)
        return list(map(self._matrix, weights))

    def _matrix(self, weight: torch.Tensor) -> Matrix:
        num_out, num_in = weight.shape
        kind = KINDS[weight.dtype]
        panels = self._huge_pages.zeros(packed_bytes((num_out, num_in), kind))
        self._library.pack(weight.data_ptr(), kind, (num_out, num_in), kind, panels)
        return Matrix(
            panels=address(panels),
            num_panels=-(-num_out // PANEL),
            num_in=num_in,
            num_out=num_out,
            kind=kind,
        )


class NativeAdapters:
    """The loaded adapters, by digest. A slice of a step names its adapter by the digest."""

    def __init__(self) -> None:
        self._packed: dict[str, PackedLora] = {}
        self._rows: Any = None  # the last step's array of `LoraRows`; C++ has a pointer to it

    def add(self, packed: PackedLora) -> None:
        self._packed[packed.digest] = packed

    def drop(self, digest: str) -> None:
        self._packed.pop(digest, None)

    def fields(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Returns the fields of the struct `Step` that say which rows use which adapter. `counts`
        has the number of rows of each adapter, as `rows_by_adapter` returns them."""
        if not counts:
            return {}
        packed = [self._packed[digest] for digest in counts]
        firsts = accumulate(counts.values(), initial=0)
        self._rows = (library.LoraRows * len(packed))(
            *(
                library.LoraRows(each.layers, first, num_rows)
                for each, first, num_rows in zip(packed, firsts, counts.values(), strict=False)
            )
        )
        rank = max(each.rank for each in packed)
        return {"adapted": self._rows, "num_adapted": len(packed), "lora_rank": rank}


def by_adapter(slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """Returns the slices grouped by adapter. Slices without an adapter come last."""
    return sorted(slices, key=lambda piece: (not piece.adapter, piece.adapter))


def rows_by_adapter(slices: Sequence[SequenceSlice]) -> dict[str, int]:
    """Returns the number of rows of each adapter. `slices` must be in the order that `by_adapter`
    returns."""
    counts: dict[str, int] = {}
    for piece in slices:
        if piece.adapter:
            counts[piece.adapter] = counts.get(piece.adapter, 0) + piece.num_tokens
    return counts
