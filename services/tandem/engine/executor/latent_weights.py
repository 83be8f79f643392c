"""The tensors of latent attention in checkpoints, and as decoders read them.

self_attn.q_proj.weight                     [heads * (plain + rope), hidden]    without a q rank
self_attn.q_a_proj.weight, .bias            [q rank, hidden]                    else
self_attn.q_a_layernorm.weight              [q rank]
self_attn.q_b_proj.weight                   [heads * (plain + rope), q rank]
self_attn.kv_a_proj_with_mqa.weight, .bias  [kv rank + rope, hidden]
self_attn.kv_a_layernorm.weight             [kv rank]
self_attn.kv_b_proj.weight                  [heads * (plain + value), kv rank]
self_attn.o_proj.weight, .bias              [hidden, heads * value]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from tandem.engine.executor.expert_weights import Shapes
from tandem.models.config import ModelConfig
from tandem.models.latent import Latent

# transformers ignores rms_norm_eps in norms of latents.
LATENT_NORM_EPS = 1e-6


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


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of attention beside the products of a layer's input and of what it attended."""

    q_norm: torch.Tensor | None  # [q rank]
    q_out: torch.Tensor | None  # [heads * (plain + rope), q rank]
    kv_norm: torch.Tensor  # [kv rank]
    keys: torch.Tensor  # [heads, kv rank, plain]: of a query, to what meets a latent
    values: torch.Tensor  # [heads, value, kv rank]: of what a head attended

    @classmethod
    def read(cls, name: str, latent: Latent, tensor: Callable[[str], torch.Tensor]) -> Self:
        """Reads the tensors of the attention `name` by what gives one by its name."""
        rows = tensor(f"{name}.kv_b_proj.weight")
        rows = rows.view(-1, latent.plain_dim + latent.value_dim, latent.kv_rank)
        q_norm = q_out = None
        if latent.q_rank is not None:
            q_norm = tensor(f"{name}.q_a_layernorm.weight")
            q_out = query_rows(latent).in_halves(tensor(f"{name}.q_b_proj.weight"))
        return cls(
            q_norm=q_norm,
            q_out=q_out,
            kv_norm=tensor(f"{name}.kv_a_layernorm.weight"),
            keys=rows[:, : latent.plain_dim].transpose(1, 2).contiguous(),
            values=rows[:, latent.plain_dim :].contiguous(),
        )


def query_rows(latent: Latent) -> RotatedRows:
    """Returns the order of the rows of a matrix that makes queries."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the products of a layer's input: queries or their latent, and a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]


def latent_shapes(config: ModelConfig, latent: Latent) -> Shapes:
    """Returns the shapes of a layer's attention."""
    hidden, heads, has_bias = config.hidden_size, config.num_attention_heads, config.qkv_bias
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (latent.plain_dim + latent.value_dim),
            latent.kv_rank,
        ),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if has_bias:
        shapes["self_attn.kv_a_proj_with_mqa.bias"] = (latent.kv_dim,)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if latent.q_rank is None:
        shapes["self_attn.q_proj.weight"] = (heads * latent.q_dim, hidden)
        return shapes
    shapes["self_attn.q_a_proj.weight"] = (latent.q_rank, hidden)
    if has_bias:
        shapes["self_attn.q_a_proj.bias"] = (latent.q_rank,)
    shapes["self_attn.q_a_layernorm.weight"] = (latent.q_rank,)
    shapes["self_attn.q_b_proj.weight"] = (heads * latent.q_dim, latent.q_rank)
    return shapes
