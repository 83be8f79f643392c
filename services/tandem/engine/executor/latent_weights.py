"""The weights of latent attention, as decoders read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from tandem.models.config.latent import Latent

if TYPE_CHECKING:
    from tandem.engine.executor.tensors_by_name import TensorsByName

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
    def read(cls, name: str, latent: Latent, tensors: TensorsByName) -> Self:
        """Reads the tensors of the attention `name`."""
        q_norm = q_out = None
        if latent.q_rank is not None:
            q_norm = tensors.tensor(f"{name}.q_a_layernorm.weight")
            q_out = query_rows(latent).in_halves(tensors.tensor(f"{name}.q_b_proj.weight"))
        keys, values = _keys_and_values(name, latent, tensors)
        return cls(
            q_norm=q_norm,
            q_out=q_out,
            kv_norm=tensors.tensor(f"{name}.kv_a_layernorm.weight"),
            keys=keys,
            values=values,
        )


def _keys_and_values(
    name: str, latent: Latent, tensors: TensorsByName
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `keys` and `values`, which a checkpoint has as one matrix or apart."""
    if f"{name}.k_b_proj.weight" in tensors:
        keys, values = (tensors.tensor(f"{name}.{part}_b_proj.weight") for part in "kv")
        return keys, values
    rows = tensors.tensor(f"{name}.kv_b_proj.weight")
    rows = rows.view(-1, latent.plain_dim + latent.value_dim, latent.kv_rank)
    of_keys, of_values = torch.split(rows, [latent.plain_dim, latent.value_dim], 1)
    return of_keys.transpose(1, 2).contiguous(), of_values.contiguous()


def query_rows(latent: Latent) -> RotatedRows:
    """Returns the order of the rows of a matrix that makes queries."""
    return RotatedRows(latent.rope_dim, latent.q_dim, latent.has_pairs)


def token_products(latent: Latent) -> list[tuple[str, RotatedRows]]:
    """Returns the products of a layer's input: queries or their latent, and a token's KV."""
    kv = RotatedRows(latent.rope_dim, latent.kv_dim, latent.has_pairs)
    if latent.q_rank is None:
        return [("q_proj", query_rows(latent)), ("kv_a_proj_with_mqa", kv)]
    return [("q_a_proj", RotatedRows(0, latent.q_rank, False)), ("kv_a_proj_with_mqa", kv)]
