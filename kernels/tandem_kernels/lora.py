"""Adds LoRA deltas, (x A^T) B^T, to the output of a linear layer, for the rows of each adapter.

    out[rows, first : first + N] += (x[rows] A^T) B^T     A [rank, in], B [N, rank] times the scale

A fused layer (q, k and v) has one part for each of its matrices. In a layer with one matrix per
head, each head has its own A and B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]
ProductOfHeads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The adapter of one matrix. The matrix produces a range of the output's columns."""

    first: int  # first column of this range
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], multiplied by the scale


@dataclass(frozen=True, slots=True)
class LoraHeads:
    """The adapter of a layer with one matrix per head. A tensor that all heads share is expanded to
    all heads."""

    a: torch.Tensor  # [heads, rank, in]
    b: torch.Tensor  # [heads, out, rank], multiplied by the scale


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    rows: torch.Tensor,
    parts: Sequence[LoraPart],
    linear: Product,
    row_multiple: int = 1,
) -> None:
    """Adds one adapter's deltas to the rows `rows` [n] of `out` [T, out]; `x` [T, in] is the
    layer's input.

    `linear` is the function that computed the base layer. `rows` is padded to a multiple of
    `row_multiple`, as `linear_invariant` requires. With that function, the bits of a row depend on
    this row only.
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
    """Adds one adapter's deltas to the rows `rows` [n] of `out` [T, heads, out], the output of a
    layer with one matrix per head. The other arguments are as in `add_lora`."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[0] % row_multiple))
    low = linear_of_heads(x[padded], heads.a)
    out[rows] = out[rows] + linear_of_heads(low, heads.b)[: rows.shape[0]]
