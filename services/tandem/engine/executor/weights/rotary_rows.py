"""The order of the rows of matrices that make queries, keys and values, as decoders read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tandem.models.config.latent import Latent
from tandem.models.config.model import ModelConfig


def rotary_rows(config: ModelConfig) -> torch.Tensor | None:
    """Returns the order of the rows of q, k and v as decoders read them; None: as they are stored.

    Kernels rotate number i of a head with number i + half of it. Where a part of each head is
    rotated, that part's pairs come first in both halves."""
    head_dim = config.head_dim
    rotary_dim = config.layers[0].rope.rotary_dim(head_dim)
    if rotary_dim == head_dim or config.latent is not None:
        return None
    turned, still = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = zip(turned.chunk(2), still.chunk(2), strict=True)
    of_head = torch.cat([torch.cat(parts) for parts in halves])
    num_heads = config.num_attention_heads + config.num_kv_heads
    turned_rows = (torch.arange(num_heads).unsqueeze(1) * head_dim + of_head).flatten()
    num_values = config.num_kv_heads * head_dim
    return torch.cat((turned_rows, len(turned_rows) + torch.arange(num_values)))


class RotatedRows(NamedTuple):
    """Rows of a matrix that are rotated, as checkpoints have them."""

    num: int  # at the end of each part; 0: none
    part_dim: int
    has_pairs: bool  # those that are rotated together are side by side

    def in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order of kernels, which rotate number i of a half with number i
        of the other one."""
        if not self.num or not self.has_pairs:
            return rows
        parts = rows.view(-1, self.part_dim, *rows.shape[1:])
        plain, rotated = torch.split(parts, [self.part_dim - self.num, self.num], 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).view(rows.shape)


def query_rows(latent: Latent) -> RotatedRows:
    """Returns the order of the rows of a matrix that makes queries."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the products of a layer's input: queries or their latent, and a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
