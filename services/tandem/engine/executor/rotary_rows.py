"""The order of the rows of q, k and v as decoders read them."""

from __future__ import annotations

import torch

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
