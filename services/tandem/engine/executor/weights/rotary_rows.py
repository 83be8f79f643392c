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
    """The rotated rows of a matrix, as checkpoints store them."""

    num: int  # number of rotated rows at the end of each part; 0: none
    part_dim: int
    has_pairs: bool  # rows that are rotated together are adjacent

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order that kernels expect: element i of one half is rotated with
        element i of the other."""
        if not self.num or not self.has_pairs:
            return rows
        parts = rows.view(-1, self.part_dim, *rows.shape[1:])
        plain, rotated = torch.split(parts, [self.part_dim - self.num, self.num], 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).view(rows.shape)


def query_rows(latent: Latent) -> RotatedRows:
    """Returns the row order of a query matrix."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the products of a layer's input: the queries or their latent, and a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
