"""The weights of a decoder in the form that all decoders read. load.py creates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tandem.engine.executor.weights.released_memory import FilePages
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import GgufBlocks

# transformers ignores rms_norm_eps in the norms of latents.
LATENT_NORM_EPS = 1e-6

Quantized = GgufBlocks | Fp8 | PackedGroups


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]; on the device "meta" if `blocks` has the numbers
    bias: torch.Tensor | None  # [out]
    blocks: Quantized | None = None  # set for a quantized matrix


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: tuple[Linear, ...]  # gate and up, or one matrix with the rows of both
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden]; may be float32
    mlps: tuple[Mlp, ...]
    shared: Mlp | None = None  # an MLP that all tokens use
    correction: torch.Tensor | None = None  # [experts], float32


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of latent attention, in addition to the layer's `qkv` and `attention_out`."""

    q_norm: torch.Tensor | None  # [q rank]
    q_out: torch.Tensor | None  # [heads * (plain + rope), q rank]
    kv_norm: torch.Tensor  # [kv rank]
    keys: torch.Tensor  # [heads, kv rank, plain]: maps a query to the space of latents
    values: torch.Tensor  # [heads, value, kv rank]: maps the attention output of a head to values


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer. Norms of families that add an offset include it and are float32."""

    # q, k and v, or one matrix with the rows of all three; see also `latent`
    qkv: tuple[Linear, ...]
    attention_out: Linear
    mlp: Mlp | ExpertWeights
    attention_norm: torch.Tensor | None = None  # before attention
    attention_post_norm: torch.Tensor | None = None  # applied to the output of attention
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]: attention scores that have no key
    # if set, `qkv` computes queries or their latent, and a token's KV
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]; on the device "meta" if quantized, as in Linear
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    output: torch.Tensor  # [vocab, hidden]; the embedding itself if they are tied
    embedding_blocks: Quantized | None = None
    output_blocks: Quantized | None = None
    pages: FilePages = field(default_factory=FilePages)  # the mapped files of the weights

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def loaded(self) -> ModelWeights:
        """Returns the same weights with all layers in memory."""
        return replace(self, layers=tuple(self.layers))
