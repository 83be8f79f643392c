"""A decoder's weights as all decoders read them. load.py makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tandem.engine.executor.weights.released_memory import FilePages
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import Blocks

# transformers ignores rms_norm_eps in norms of latents.
LATENT_NORM_EPS = 1e-6

Quantized = Blocks | Fp8 | PackedGroups


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]; on the device "meta" if `blocks` has the numbers
    bias: torch.Tensor | None  # [out]
    blocks: Quantized | None = None  # a quantized matrix


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: tuple[Linear, ...]  # gate and up, or one with the rows of both
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden]; may be float32
    mlps: tuple[Mlp, ...]
    shared: Mlp | None = None  # of all tokens
    correction: torch.Tensor | None = None  # [experts], float32


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention; `qkv` and `attention_out` of the layer belong to it, too."""

    q_norm: torch.Tensor | None  # [q rank]
    q_out: torch.Tensor | None  # [heads * (plain + rope), q rank]
    kv_norm: torch.Tensor  # [kv rank]
    keys: torch.Tensor  # [heads, kv rank, plain]: of a query, to what meets a latent
    values: torch.Tensor  # [heads, value, kv rank]: of what a head attended


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; norms that a family adds an offset to have it, and are float32."""

    qkv: tuple[Linear, ...]  # q, k and v, or one with the rows of all three; see also `latent`
    attention_out: Linear
    mlp: Mlp | ExpertWeights
    attention_norm: torch.Tensor | None = None  # before attention
    attention_post_norm: torch.Tensor | None = None  # of what it adds
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]: scores without keys
    latent: LatentWeights | None = None  # qkv is of queries or their latent, and of a token's KV


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden]; as Linear.weight
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    output: torch.Tensor  # [vocab, hidden]; the embedding itself when they are tied
    embedding_blocks: Quantized | None = None
    output_blocks: Quantized | None = None
    pages: FilePages = field(default_factory=FilePages)  # of the files

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def loaded(self) -> ModelWeights:
        """Returns the same with all layers in memory."""
        return replace(self, layers=tuple(self.layers))
