"""Adds LoRA deltas, (x A^T) B^T, to the output of a linear layer, for the rows that use an adapter.

    out[rows, first : first + N] += (x[rows] A^T) B^T     A [rank, in], B [N, rank] times the scale

The N columns from `first` on are the outputs of one matrix. A linear layer with several fused
matrices, such as q, k and v, has an A and a B for each of them. A layer with one matrix per head
has an A and a B for each head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor, torch.Tensor, None], torch.Tensor]
ProductOfHeads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The A and B of one matrix of a linear layer."""

    first: int  # the first column of the layer's output that the matrix computes
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank], multiplied by the scale


@dataclass(frozen=True, slots=True)
class LoraHeads:
    """The A and B of each head in a linear layer with one matrix per head. If all heads share one
    A or one B, the tensor is a view that repeats it for each head without copies."""

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
    """Adds one adapter's deltas to `rows` [n] of `out` [T, out], the output of a linear layer for
    the input `x` [T, in].

    `linear` is the function that computed the layer. The number of rows that are passed to `linear`
    is padded to a multiple of `row_multiple`, as `linear_invariant` requires.
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
    """Adds one adapter's deltas to `rows` [n] of `out` [T, heads, out], the output of a layer with
    one matrix per head. The other arguments are as in `add_lora`."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[0] % row_multiple))
    low = linear_of_heads(x[padded], heads.a)
    out[rows] = out[rows] + linear_of_heads(low, heads.b)[: rows.shape[0]]
