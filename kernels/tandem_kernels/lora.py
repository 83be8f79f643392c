"""Adds to a product what LoRA adapters give it: (x A^T) B^T, for the rows of each adapter.

    out[rows, first : first + N] += (x[rows] A^T) B^T     A [rank, in], B [N, rank] with the scale

A product that is several matrices side by side (q, k and v) has one part for each of them. Of a
product of heads, each head has A and B of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]
ProductOfHeads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraPart:
    """An adapter of one matrix, which makes some columns of a product."""

    first: int  # of its columns
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], the scale multiplied in


@dataclass(frozen=True, slots=True)
class LoraHeads:
    """An adapter of a matrix of each head. Those that all heads share are expanded."""

    a: torch.Tensor  # [heads, rank, in]
    b: torch.Tensor  # [heads, out, rank]; the scale is multiplied into that of each head


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    parts: Sequence[LoraPart],
    linear: Product,
    row_multiple: int = 1,
) -> None:
    """Adds one adapter's parts to some rows of `out`, the product of `x`.

    `linear` is the base product's: with the invariant one, whose rows come in multiples of
    `row_multiple`, a row's bits depend on that row alone.
    """
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[0] % row_multiple))
    picked = x[padded]
    for part in parts:
        delta = linear(linear(picked, part.a, None), part.b, None)[: rows.shape[0]]
        columns = out[:, part.first : part.first + part.b.shape[0]]
        columns[rows] = columns[rows] + delta


def add_lora_of_heads(
    out: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    heads: LoraHeads,
    linear_of_heads: ProductOfHeads,
    row_multiple: int = 1,
) -> None:
    """Adds an adapter's heads to some rows of `out` [T, heads, out], the product of `x`, as
    `add_lora` does."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[0] % row_multiple))
    low = linear_of_heads(x[padded], heads.a)
    out[rows] = out[rows] + linear_of_heads(low, heads.b)[: rows.shape[0]]
