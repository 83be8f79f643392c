"""Reorders the rows of query and key matrices. RoPE rotates the elements of a head in pairs, and
the decoders' kernels expect another order of these elements than some checkpoints. Also divides
matrices that checkpoints store as one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.models.config.indexer import Indexer
from tandem.models.config.latent import Latent
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import GatedDelta
from tandem.models.config.model import ModelConfig
from tandem.models.config.rope import Rope


def head_rows(config: ModelConfig, rope: Rope) -> torch.Tensor | None:
    """Returns the order in which the kernels expect the elements of a query or key head. Item i is
    the number of the checkpoint's element that becomes element i. None: the kernels expect the
    checkpoint's order.

    Kernels rotate element i of a head with element i + D / 2, where D is the size of a head. If a
    model rotates only a part of each head, the rotated elements must come first in each half of the
    head. For example, if a head has 8 elements, and the checkpoint rotates element 0 with 2 and 1
    with 3, the order is 0 1 4 5 2 3 6 7. If it rotates element 0 with 1 and 2 with 3
    (`has_rope_pairs`), the order is 0 2 4 5 1 3 6 7.
    """
    head_dim = config.head_dim
    rotary_dim = rope.rotary_dim(head_dim)
    is_whole = rotary_dim == head_dim and not config.has_rope_pairs
    if is_whole or rope.theta is None or config.latent is not None:
        return None
    rotated = torch.arange(rotary_dim)
    halves = (rotated[::2], rotated[1::2]) if config.has_rope_pairs else rotated.chunk(2)
    unrotated = torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat([torch.cat(parts) for parts in zip(halves, unrotated, strict=True)])


def rows_of_heads(num_heads: int, size: int, elements: torch.Tensor) -> torch.Tensor:
    """Returns the rows `elements` of each head, in a matrix with `size` rows for each head."""
    return (torch.arange(num_heads).unsqueeze(1) * size + elements).flatten()


def query_and_gate_rows(config: ModelConfig, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of the queries, in the order that the kernels expect, and of the gates on
    attention's output, in a matrix that has the query and then the gate of each head."""
    size, num_heads = config.head_dim, config.num_attention_heads
    elements = torch.arange(size)
    order = head_rows(config, rope)
    order = elements if order is None else order
    return (
        rows_of_heads(num_heads, 2 * size, order),
        rows_of_heads(num_heads, 2 * size, size + elements),
    )


def joined_delta_rows(sizes: GatedDelta) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order of the rows of the two joined matrices of Gated DeltaNet in which q, k, v
    and z follow each other, and so do b and a. The matrices have these parts for each key head."""
    values = sizes.group * sizes.value_dim
    num = 2 * sizes.key_dim + 2 * values
    rows = torch.arange(sizes.num_key_heads * num).view(-1, num)
    parts = torch.split(rows, [sizes.key_dim, sizes.key_dim, values, values], 1)
    rates = torch.arange(2 * sizes.num_value_heads).view(-1, 2, sizes.group)
    return torch.cat([part.flatten() for part in parts]), rates.transpose(0, 1).flatten()


def rotary_rows(config: ModelConfig, spec: LayerSpec) -> dict[str, torch.Tensor]:
    """Returns the order in which the kernels expect the rows of the matrices q, k and v, and of one
    matrix with the rows of all three. Item i of an order is the number of the checkpoint's row that
    becomes row i. A matrix is left out if the kernels expect the checkpoint's order."""
    if (of_head := head_rows(config, spec.rope)) is None:
        return {}
    num_kv_heads = config.heads_of(spec).num_kv

    def of_heads(num_heads: int) -> torch.Tensor:
        return rows_of_heads(num_heads, config.head_dim, of_head)

    rotated = of_heads(config.num_attention_heads + num_kv_heads)
    num_values = num_kv_heads * (config.value_dim or config.head_dim)
    return {
        "self_attn.qkv_proj": torch.cat((rotated, len(rotated) + torch.arange(num_values))),
        "self_attn.q_proj": of_heads(config.num_attention_heads),
        "self_attn.k_proj": of_heads(num_kv_heads),
    }


def indexer_rows(indexer: Indexer) -> torch.Tensor:
    """Returns the order in which the torch decoder expects the elements of an indexer's heads. The
    rotated elements stay first; element i of them is rotated with element i + rope_dim / 2."""
    order = torch.arange(indexer.dim)
    if not indexer.has_pairs:
        return order
    rotated, others = order[: indexer.rope_dim], order[indexer.rope_dim :]
    return torch.cat((rotated[::2], rotated[1::2], others))


class RotatedRows(NamedTuple):
    """Says which rows of a matrix of latent attention are rotated, and in which order the
    checkpoint stores the rotated rows.

    The matrix has `part_dim` rows for each head, or `part_dim` rows that all heads share. Of each
    `part_dim` rows, the last `num` rows are rotated.
    """

    num: int  # number of rotated rows; 0: no row is rotated
    part_dim: int
    # True: row 0 of the rotated rows is rotated with row 1, row 2 with row 3, and so on.
    # False: row i of the rotated rows is rotated with row i + num / 2, as the kernels expect.
    has_pairs: bool

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order that kernels expect: row i of the rotated rows is rotated
        with row i + num / 2 of the rotated rows."""
        if not self.num or not self.has_pairs:
            return rows
        parts = rows.view(-1, self.part_dim, *rows.shape[1:])
        plain, rotated = torch.split(parts, [self.part_dim - self.num, self.num], 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).view(rows.shape)


def query_rows(latent: Latent) -> RotatedRows:
    """Returns which rows of the query matrix are rotated."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns, for the two matrices that are applied to a layer's input, the name and the rotated
    rows. The first matrix computes the queries or the latent of the queries, the second a token's
    KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
