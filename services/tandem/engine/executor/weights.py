"""A decoder's weights as all decoders read them. load_weights.py makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tandem.engine.executor.file_pages import FilePages
from tandem.engine.executor.latent_weights import LatentWeights
from tandem.models.checkpoint.quantized.fp8 import Fp8
from tandem.models.checkpoint.quantized.packed_groups import PackedGroups
from tandem.models.gguf.tensors import Blocks

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
