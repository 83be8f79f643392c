"""The row order of the query, key and value matrices that the decoders expect."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig


def rotary_rows(config: ModelConfig) -> torch.Tensor | None:
    """Returns the order of the q, k and v rows that the decoders expect; None for the stored order.

    Kernels rotate element i of a head with element i + half of the head. If only a part of each
    head is rotated, the pairs of this part come first in both halves.
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
    """The rows of a matrix that are rotated, and the order in which a checkpoint stores them.

    The matrix has one part of `part_dim` rows for each head, or one part for all heads.
    """

    num: int  # number of rotated rows at the end of each part; 0: no row is rotated
    part_dim: int
    # True: rows that are rotated together are adjacent; False: they are half of the rotated rows
    # apart
    has_pairs: bool

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order that kernels expect: the rotated rows of a part form two
        halves, and element i of one half is rotated with element i of the other."""
        if not self.num or not self.has_pairs:
            return rows
        parts = rows.view(-1, self.part_dim, *rows.shape[1:])
        plain, rotated = torch.split(parts, [self.part_dim - self.num, self.num], 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).view(rows.shape)


def query_rows(latent: Latent) -> RotatedRows:
    """Returns the rotated rows of a query matrix."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the names and rotated rows of the matrices that are applied to a layer's input. They
    produce the queries or their latent, and a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
