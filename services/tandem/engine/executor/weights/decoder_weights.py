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

# The epsilon in the norms of latents. Like transformers, Tandem does not use the config's
# rms_norm_eps in these norms.
LATENT_NORM_EPS = 1e-6
# The epsilon in the norm of an indexer's keys.
INDEX_NORM_EPS = 1e-6

Quantized = GgufBlocks | Fp8 | PackedGroups


def joined(parts: Sequence[Quantized]) -> Fp8 | PackedGroups | None:
    """Returns one matrix with the rows of several matrices, one after the other. Returns None if
    their formats differ, or if they are GGUF blocks."""
    packed = [part for part in parts if isinstance(part, PackedGroups)]
    fp8 = [part for part in parts if isinstance(part, Fp8)]
    if len(packed) == len(parts):
        return PackedGroups.joined(packed)
    return Fp8.joined(fp8) if len(fp8) == len(parts) else None


@dataclass(frozen=True, slots=True)
class Linear:
    # [out, in]. For a quantized matrix, this is a tensor on the device "meta", which has a shape
    # but no data.
    weight: torch.Tensor
    bias: torch.Tensor | None  # [out]
    # The data of a quantized matrix; None if the matrix is not quantized.
    blocks: Quantized | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    # two matrices, gate and up, or one matrix with the rows of both; without gates only up
    gate_up: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    router: Linear  # [experts, hidden], in float32 or in the compute dtype
    mlps: tuple[Mlp, ...]
    shared: Mlp | None = None  # an additional MLP that all tokens use
    # [1, hidden]: the sigmoid of its product is a factor on the output of `shared`; None: no factor
    shared_gate: Linear | None = None
    # [experts], float32: added to the router's scores to choose experts. The weights of the chosen
    # experts are computed from the scores without this addition.
    correction: torch.Tensor | None = None
    # [vocab, top_k]: the experts that are chosen for each token id. None: the router chooses.
    table: torch.Tensor | None = None
    # Norms [hidden] of `Experts.has_own_norms`: of the router's input, of the experts' input, and
    # of the outputs of the experts and of `shared`. None: router, experts and `shared` have one
    # input, and no norm.
    router_norm: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    output_norm: torch.Tensor | None = None
    shared_output_norm: torch.Tensor | None = None
    # [experts], float32: factors on the weights of the experts; None: there are none
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The additional weights of a layer with latent attention (tandem/models/config/latent.py)."""

    # The norm of a query's latent, [q rank], and the matrix that computes the queries from the
    # latent, [heads * (plain + rope), q rank]. Both are None if the model's queries have no latent.
    q_norm: torch.Tensor | None
    q_out: torch.Tensor | None
    kv_norm: torch.Tensor  # the norm of a token's KV latent, [kv rank]
    # [heads, kv rank, plain]: multiplied by the unrotated elements of a head's query
    keys: torch.Tensor
    # [heads, value, kv rank]: multiplied by a head's attention output, which is a sum of latents
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The weights of a layer's indexer (tandem/models/config/indexer.py)."""

    # [heads * dim, q rank] with latent attention: multiplied by the latent of the queries. In other
    # models [heads * dim, hidden].
    queries: torch.Tensor
    keys: torch.Tensor  # [dim, hidden]
    key_norm: torch.Tensor  # [dim]: the norm of the keys, LayerNorm if there is a bias
    key_norm_bias: torch.Tensor | None = None  # [dim]
    query_norm: torch.Tensor | None = None  # [dim]: the norm of each head's query
    # [heads, hidden], float32: computes the weights of the heads. They include the factor
    # 1 / sqrt(heads * dim). None: heads have no weights.
    head_weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedKvWeights:
    """The additional weights of attention with one KV head whose keys are its values
    (tandem/models/config/deepseek_v4.py)."""

    q_norm: torch.Tensor  # [q rank], float32: the norm of a query's latent
    q_out: Linear  # [heads * head_dim, q rank]: computes the queries from the latent
    kv_norm: torch.Tensor  # [head_dim], float32
    # [groups, out rank, heads * head_dim / groups]: multiplied by the outputs of a group's heads
    out_groups: torch.Tensor


@dataclass(frozen=True, slots=True)
class EntryWeights:
    """The weights with which a compressor makes one kind of entry."""

    bias: torch.Tensor  # [rate, dim or 2 dim], float32: added to the gates of a run's tokens
    norm: torch.Tensor  # [dim], float32


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """The weights of a layer's compressor (tandem/models/config/compressor.py)."""

    # Compute the inputs and the gates of each kind of entry: [dim or 2 dim, hidden] each.
    inputs: tuple[Linear, ...]
    parts: tuple[EntryWeights, ...]  # one for each kind of entry
    # Those of the indexer: [heads * dim, q rank], and [heads, hidden] in float32, as in
    # `IndexerWeights`.
    queries: torch.Tensor | None = None
    head_weights: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """The weights that compute from the residual streams how they are mixed, all in float32. There
    are streams * (2 + streams) outputs and 3 scales, or streams outputs and 1 scale."""

    matrix: torch.Tensor  # [outputs, streams * hidden]
    base: torch.Tensor  # [outputs]
    scale: torch.Tensor  # [scales]


@dataclass(frozen=True, slots=True)
class LayerStreamWeights:
    """The weights of the streams before attention and before the MLP."""

    attention: StreamWeights
    mlp: StreamWeights


@dataclass(frozen=True, slots=True)
class StateWeights:
    """The additional weights of a layer that keeps a state
    (tandem/models/config/linear_attention.py). A short convolution has only the first two."""

    conv: torch.Tensor  # [channels, kernel]: the channels of each section, in their order
    conv_bias: torch.Tensor | None = None  # [channels]
    a_log: torch.Tensor | None = None  # [heads], float32: logarithm of the decay's factor
    # [heads], float32: added to the decay's input. Kimi Delta Attention: [outputs]
    dt_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None  # [heads], float32: Mamba 2's D, a factor on x in the output
    # The norm of the output, [value dim] for the value heads of Gated DeltaNet and Kimi Delta
    # Attention, [outputs] for Mamba 2. None: no norm.
    norm: torch.Tensor | None = None
    output_factor: float = 1.0  # factor on the output
    # Kimi Delta Attention: [outputs, dim], the second matrices of the decays and of the output
    # gates
    decay_out: Linear | None = None
    gate_out: Linear | None = None


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """The weights with which a layer adds in the tokens' embeddings for this layer."""

    gate: Linear  # [size of the embedding, hidden]
    projection: Linear  # [hidden, size of the embedding]
    norm: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class AltUpWeights:
    """The weights with which a layer predicts and corrects the copies of the residual stream
    (tandem/models/config/gemma3n.py)."""

    router_norm: torch.Tensor  # [hidden]
    router: Linear  # [copies, hidden]
    prediction: Linear  # [copies * copies, copies]
    correction: Linear  # [copies, copies]
    output_scale: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class LaurelWeights:
    left: Linear  # [rank, hidden]
    right: Linear  # [hidden, rank]
    norm: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class CopyWeights:
    """The matrices [hidden, hidden] that make all copies of the residual stream but the first, and
    those that merge them."""

    make: tuple[Linear, ...]
    merge: tuple[Linear, ...]


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """The weights of the embeddings that tokens have for each layer (`PerLayerInputs`)."""

    embedding: torch.Tensor  # [vocab, layers * size]
    projection: Linear  # [layers * size, hidden]
    norm: torch.Tensor  # [size]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer. Some model families add an offset, such as 1, to the weights of
    norms. In these families, the norms in this class include the offset and are in float32."""

    # The matrices q, k and v, or one matrix with the rows of all three. With latent attention, two
    # matrices, or one with the rows of both: the first computes the queries or the latent of the
    # queries, the second the KV. If keys are values, the same. In a layer that keeps a state, the
    # rows are:
    #   Gated DeltaNet      the channels of the convolution, the output gates z [outputs], and b and
    #                       a [value heads] each
    #   Kimi Delta          the channels of the convolution, b [heads], and the inputs of
    #   Attention           `decay_out` and of `gate_out` [dim] each
    #   Mamba 2             z [outputs], the channels of the convolution, and dt [heads]
    #   short convolution   B, C and x [channels] each
    # If the layer has attention, too, q, k and v come first. A layer that is only an MLP has none.
    qkv: tuple[Linear, ...]
    # [hidden, outputs of attention or of the state]; with both, those of attention come first
    attention_out: Linear | None  # None: the layer is only an MLP
    mlp: Mlp | ExpertWeights | None  # None: the layer has no MLP
    attention_norm: torch.Tensor | None = None  # the norm before attention
    attention_post_norm: torch.Tensor | None = None  # applied to the output of attention
    mlp_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim], or [all heads * head_dim]
    k_norm: torch.Tensor | None = None
    # [heads]: one extra score in each head's softmax that belongs to no key; None: no sinks
    sinks: torch.Tensor | None = None
    latent: LatentWeights | None = None  # None: the layer has no latent attention
    indexer: IndexerWeights | None = None  # None: the layer has no indexer
    # [heads * head_dim or heads, hidden]: the sigmoid of its product is a factor on attention's
    # output
    attention_gate: Linear | None = None
    state: StateWeights | None = None  # None: the layer keeps no state
    # [rows of qkv], float32: factors on the product of qkv; None: no factors
    projected_factors: torch.Tensor | None = None
    scalar: torch.Tensor | None = None  # [1], a factor on the layer's output; None: no factor
    # None: tokens have no embeddings for layers.
    layer_inputs: LayerInputWeights | None = None
    # None: the residual stream has no copies.
    alt_up: AltUpWeights | None = None
    laurel: LaurelWeights | None = None
    shared_kv: SharedKvWeights | None = None  # None: keys are not values.
    compressor: CompressorWeights | None = None  # None: the layer has no compressor
    streams: LayerStreamWeights | None = None  # None: the residual stream is one stream.


@dataclass(frozen=True, slots=True)
class ModelWeights:
    # [vocab, hidden]. If the embedding is quantized, `embedding_blocks` has the data instead.
    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    # [vocab, hidden]. If the model has tied embeddings, this is the same tensor as `embedding`.
    output: torch.Tensor
    embedding_blocks: Quantized | None = None
    output_blocks: Quantized | None = None
    per_layer: PerLayerWeights | None = None  # None: tokens have no embeddings for layers
    copies: CopyWeights | None = None  # None: the residual stream has no copies
    head_streams: StreamWeights | None = None  # None: the residual stream is one stream
    # The address ranges at which the checkpoint's files are mapped.
    pages: FilePages = field(default_factory=FilePages)

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    def loaded(self) -> ModelWeights:
        """Returns the same weights with all layers loaded. Without this call, each access to a
        layer loads the layer again."""
        return replace(self, layers=tuple(self.layers))
