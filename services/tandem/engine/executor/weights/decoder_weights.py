"""The weights of a decoder, in the form that the torch, native and Triton decoders read. load.py
creates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tandem.engine.executor.weights.released_memory import FilePages
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import GgufBlocks

# The epsilon in the norms of latents. Like transformers, these norms ignore rms_norm_eps.
LATENT_NORM_EPS = 1e-6

Quantized = GgufBlocks | Fp8 | PackedGroups


@dataclass(frozen=True, slots=True)
class Linear:
    # [out, in]. If `blocks` is set, `weight` is on the device "meta": it has a shape but no data.
    weight: torch.Tensor
    bias: torch.Tensor | None  # [out]
    # The data of a quantized matrix; None: the matrix is not quantized, and `weight` has the data.
    blocks: Quantized | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: tuple[Linear, ...]  # gate and up, or one matrix with the rows of both
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden]; float32 or the compute dtype
    mlps: tuple[Mlp, ...]
    shared: Mlp | None = None  # an MLP that all tokens use
    # [experts], float32: added to the router's scores to choose experts, but not to weigh them
    correction: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer that only latent attention has (tandem/models/config/latent.py). The
    other weights are in `LayerWeights`."""

    q_norm: torch.Tensor | None  # [q rank]; None: queries have no latent
    q_out: torch.Tensor | None  # [heads * (plain + rope), q rank]; None: queries have no latent
    kv_norm: torch.Tensor  # [kv rank]
    keys: torch.Tensor  # [heads, kv rank, plain]: maps a head's query to the space of latents
    values: torch.Tensor  # [heads, value, kv rank]: maps a head's attention output to values


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer. Some model families add an offset, such as 1, to the weights of
    norms. Their norms are stored here after this addition, in float32."""

    # The matrices q, k and v, or one matrix with the rows of all three. With latent attention: the
    # matrix that computes the queries or their latent, and the matrix that computes a token's KV.
    qkv: tuple[Linear, ...]
    attention_out: Linear
    mlp: Mlp | ExpertWeights
    attention_norm: torch.Tensor | None = None  # the norm before attention
    attention_post_norm: torch.Tensor | None = None  # applied to the output of attention
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]: scores of attention sinks, which have no key
    # None: the layer has no latent attention.
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    # [vocab, hidden]. If `embedding_blocks` is set, it has the data, and `embedding` has none.
    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    output: torch.Tensor  # [vocab, hidden]; the same tensor as `embedding` if the model ties them
    embedding_blocks: Quantized | None = None
    output_blocks: Quantized | None = None
    # The memory ranges of the mapped files from which the weights come.
    pages: FilePages = field(default_factory=FilePages)

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def loaded(self) -> ModelWeights:
        """Loads all layers into memory. Otherwise each access to a layer loads that layer again."""
        return replace(self, layers=tuple(self.layers))
