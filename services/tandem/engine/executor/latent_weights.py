"""The weights of latent attention, as decoders read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

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
