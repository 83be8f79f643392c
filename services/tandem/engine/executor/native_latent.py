"""Packs the weights of latent attention for the C++ decoder."""

from __future__ import annotations

import torch

from tandem.engine.executor.latent_weights import LATENT_NORM_EPS, LatentWeights
from tandem.engine.executor.packing import Packer
from tandem.engine.executor.weights import Linear
from tandem.models.config.latent import Latent as LatentSizes
from tandem_kernels.native.library import Latent, Matrix


def pack_latent(packer: Packer, sizes: LatentSizes, weights: LatentWeights) -> Latent:
    """Returns a struct that lives as long as the packer."""
    latent = Latent(
        q_norm=packer.floats(weights.q_norm),
        kv_norm=packer.floats(weights.kv_norm),
        keys=_of_heads(packer, weights.keys),
        values=_of_heads(packer, weights.values),
        kv_rank=sizes.kv_rank,
        rope=sizes.rope_dim,
        plain=sizes.plain_dim,
        value=sizes.value_dim,
        norm_eps=LATENT_NORM_EPS,
    )
    if weights.q_out is not None:
        latent.q_out = packer.matrix((Linear(weights.q_out, None),))
    packer.keep(latent)
    return latent


def _of_heads(packer: Packer, weights: torch.Tensor) -> object:
    """Packs a matrix of each head, which one thread multiplies with: never as int8."""
    matrices = [packer.matrix((Linear(each, None),), keeps_kind=True) for each in weights]
    packed = (Matrix * len(matrices))(*matrices)
    packer.keep(packed)
    return packed
