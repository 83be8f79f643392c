"""Reorders the rows of query and key matrices, because checkpoints and the decoders' kernels order
the elements that RoPE rotates differently."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig


def rotary_rows(config: ModelConfig) -> torch.Tensor | None:
    """Returns the order in which the kernels expect the rows of q, k and v, as indices of the
    checkpoint's rows. None: the kernels expect the checkpoint's order.

    Kernels rotate element i of a head with element i + D / 2. If only a part of each head is
    rotated, the rotated elements must be the first ones of both halves. In a head of 8 elements, of
    which the checkpoint rotates 0 with 2 and 1 with 3, the order is 0 1 4 5 2 3 6 7.
    """
    head_dim = config.head_dim
    rotary_dim = config.layers[0].rope.rotary_dim(head_dim)
    if rotary_dim == head_dim or config.latent is not None:
        return None
    rotated = torch.arange(rotary_dim)
    unrotated = torch.arange(rotary_dim, head_dim)
    halves = zip(rotated.chunk(2), unrotated.chunk(2), strict=True)
    of_head = torch.cat([torch.cat(parts) for parts in halves])
    num_heads = config.num_attention_heads + config.num_kv_heads
    rotated_rows = (torch.arange(num_heads).unsqueeze(1) * head_dim + of_head).flatten()
    num_values = config.num_kv_heads * head_dim
    return torch.cat((rotated_rows, len(rotated_rows) + torch.arange(num_values)))


class RotatedRows(NamedTuple):
    """The rows of a matrix of latent attention that are rotated, and the checkpoint's order of
    these rows.

    The matrix has `part_dim` rows for each head, or `part_dim` rows that all heads share. The last
    `num` of these are rotated.
    """

    num: int  # 0: no row is rotated
    part_dim: int
    # True: row 0 of the rotated rows is rotated with row 1, row 2 with row 3, and so on.
    # False: row i of the rotated rows is rotated with row i + num / 2, as the kernels expect.
    has_pairs: bool

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order that kernels expect, in which row i of the rotated rows is
        rotated with row i + num / 2."""
        if not self.num or not self.has_pairs:
            return rows
        parts = rows.view(-1, self.part_dim, *rows.shape[1:])
        plain, rotated = torch.split(parts, [self.part_dim - self.num, self.num], 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).view(rows.shape)


def query_rows(latent: Latent) -> RotatedRows:
    """Returns which rows of the query matrix are rotated."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the names of the two matrices that are applied to a layer's input, and which of their
    rows are rotated. The first computes the queries or their latent, the second a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
