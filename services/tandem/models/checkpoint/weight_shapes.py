"""Derives the names and shapes of a model's tensors from its config.

A layer with latent attention has the following tensors. RoPE rotates only a part of a head's query:
"rope" is the size of that part, and "plain" is the size of the other part. "value" is the size of a
head's value. "q rank" and "kv rank" are the sizes of the latents (`Latent`).

name                                  shape                               present
self_attn.q_proj.weight               [heads * (plain + rope), hidden]    without q rank
self_attn.q_a_proj.weight             [q rank, hidden]                    with q rank
self_attn.q_a_layernorm.weight        [q rank]                            with q rank
self_attn.q_b_proj.weight             [heads * (plain + rope), q rank]    with q rank
self_attn.kv_a_proj_with_mqa.weight   [kv rank + rope, hidden]            always
self_attn.kv_a_layernorm.weight       [kv rank]                           always
self_attn.kv_b_proj.weight            [heads * (plain + value), kv rank]  all but newer GGUF files
self_attn.k_b_proj.weight             [heads, kv rank, plain]             newer GGUF files
self_attn.v_b_proj.weight             [heads, value, kv rank]             newer GGUF files
self_attn.o_proj.weight               [hidden, heads * value]             always

q_a_proj, kv_a_proj_with_mqa and o_proj may have a bias, whose shape is the first size of the
weight.

A layer with an indexer (`Indexer`) has these tensors in addition:

name                                  shape
self_attn.indexer.wq_b.weight         [index heads * index dim, q rank]
self_attn.indexer.wk.weight           [index dim, hidden]
self_attn.indexer.k_norm.weight       [index dim], and a bias of this shape
self_attn.indexer.weights_proj.weight [index heads, hidden]

If the indexer chooses blocks:

self_attn.indexer.q_proj.weight       [index heads * index dim, hidden]
self_attn.indexer.k_proj.weight       [index dim, hidden]
self_attn.indexer.{q,k}_norm.weight   [index dim]

A layer of DeepSeek V4 (`SharedKv`) has these tensors in place of those of other attention. "dim" is
the head size, "narrow" is groups * out rank. "entry" is the size of an entry, or twice it if runs
overlap (`Compressor`):

name                                          shape                           present
self_attn.q_a_proj.weight                     [q rank, hidden]                always
self_attn.q_a_norm.weight                     [q rank]                        always
self_attn.q_b_proj.weight                     [heads * dim, q rank]           always
self_attn.kv_proj.weight                      [dim, hidden]                   always
self_attn.kv_norm.weight                      [dim]                           always
self_attn.o_a_proj.weight                     [narrow, heads * dim / groups]  always
self_attn.o_b_proj.weight                     [hidden, narrow]                always
self_attn.sinks                               [heads]                         always
self_attn.compressor.{kv,gate}_proj.weight    [entry, hidden]                 with a compressor
self_attn.compressor.position_bias            [rate, entry]                   with a compressor
self_attn.compressor.kv_norm.weight           [dim]                           with a compressor

With an indexer, `self_attn.compressor.indexer` has tensors of the same names, and q_b_proj.weight
[index heads * index dim, q rank] and scorer.weights_proj.weight [index heads, hidden]. A layer also
has attn_hc.{fn,base,scale} and ffn_hc.{fn,base,scale}, and the model hc_head.hc_{fn,base,scale}
(`StreamWeights`).

A layer with linear attention (`GatedDelta`) has the following tensors. The outputs of joined
matrices are ordered by key head: for each key head q, k, v and z, and b and a. Otherwise the q of
all heads come first, then their k, then v.

name                                  shape                                         present
linear_attn.in_proj_qkvz.weight       [channels + value heads * value dim, hidden]  joined, not in
                                                                                    newer GGUF files
linear_attn.in_proj_ba.weight         [2 * value heads, hidden]                     joined
linear_attn.in_proj_qkv.weight        [channels, hidden]                            otherwise
linear_attn.in_proj_z.weight          [value heads * value dim, hidden]             otherwise
linear_attn.in_proj_{b,a}.weight      [value heads, hidden]                         not joined
linear_attn.conv1d.weight             [channels, 1, kernel]
linear_attn.A_log, linear_attn.dt_bias  [value heads]
linear_attn.norm.weight               [value dim]
linear_attn.out_proj.weight           [hidden, value heads * value dim]

OLMo Hybrid has {q,k,v,g,b,a}_proj.weight in place of in_proj, where g is z, and
{q,k,v}_conv1d.weight in place of conv1d.

A layer with Kimi Delta Attention (`KimiDelta`) has these tensors. "outputs" is heads * dim.

name                                  shape
self_attn.{q,k,v}_proj.weight         [outputs, hidden]
self_attn.{q,k,v}_conv1d.weight       [outputs, 1, kernel]
self_attn.b_proj.weight               [heads, hidden]
self_attn.{f,g}_a_proj.weight         [dim, hidden]          of the decays and of the output gates
self_attn.{f,g}_b_proj.weight         [outputs, dim]
self_attn.A_log                       [1, 1, heads, 1]
self_attn.dt_bias                     [outputs]
self_attn.o_norm.weight               [dim]
self_attn.o_proj.weight               [hidden, outputs]

A layer with Mamba 2 or a short convolution has the following tensors. "outputs" is `num_outputs`.
With Mamba 2, the outputs of in_proj are the gates z [outputs], the channels, and dt [heads]; of a
short convolution they are B, C and x.

name                                          shape                                   present
linear_attn.in_proj.weight                    [2 * outputs + B and C + heads, hidden] Mamba 2
                                              [3 * outputs, hidden]                   otherwise
linear_attn.conv1d.weight                     [channels, 1, kernel]
linear_attn.{A_log,D,dt_bias}                 [heads]                                 Mamba 2
linear_attn.norm.weight                       [outputs]                               has_norm
linear_attn.out_proj.weight                   [hidden, outputs]

in_proj, conv1d and out_proj may have a bias.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.expert_names import ExpertNames, Shapes, shared_mlp
from tandem.models.config.deepseek_v4 import SharedKv, Streams
from tandem.models.config.gemma3n import AltUp
from tandem.models.config.latent import Latent
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import (
    GatedDelta,
    KimiDelta,
    LinearAttention,
    Mamba2,
    ShortConv,
)
from tandem.models.config.model import ModelConfig
from tandem.models.config.score_head import SCORE

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# Tensors of the embeddings that a token has for each layer (`PerLayerInputs`).
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_NORM = "model.per_layer_projection_norm.weight"
# Beginnings of the names of matrices that make copies of the residual stream and merge them
# (`AltUp`). A number follows.
COPY_PROJECTIONS = "model.altup_projections"
MERGE_PROJECTIONS = "model.altup_unembed_projections"
# Beginning of the names of the weights that sum the streams of the residual stream (`Streams`).
HEAD_STREAMS = "model.hc_head.hc_"
# Value of `ModelConfig.norms` -> (field of LayerWeights -> name of the norm in checkpoints).
NORMS: dict[str, dict[str, str]] = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "around": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "parallel": {"attention_norm": "input_layernorm", "mlp_norm": "input_layernorm"},
    "around_glm": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
}
# Field of ExpertWeights -> name of the norm, and two factors (`Experts.has_own_norms`).
EXPERT_NORMS = {
    "input_norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
    "shared_output_norm": "post_feedforward_layernorm_1",
}
ROUTER_SCALE = "router.scale"  # the weights of the router's norm, times the root of hidden
EXPERT_SCALES = "router.per_expert_scale"
_WHOLE, _KEYS, _VALUES = (f"self_attn.{part}_b_proj.weight" for part in ("kv", "k", "v"))


def expected_shapes(config: ModelConfig, stored: Collection[str]) -> Shapes:
    """Returns the shape of every tensor that a checkpoint of this model must have, by name. Where
    several naming schemes exist, the scheme of the names in `stored` applies. Raises
    UnsupportedModel if the config has more experts than the checkpoint has tensors."""
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    if config.score_head is not None:
        shapes[SCORE] = (len(config.score_head.labels), hidden)
    if config.per_layer_inputs is not None:
        width = config.num_layers * config.per_layer_inputs.size
        shapes[LAYER_EMBEDDING] = (config.per_layer_inputs.vocab_size, width)
        shapes[LAYER_PROJECTION] = (width, hidden)
        shapes[LAYER_NORM] = (config.per_layer_inputs.size,)
    if config.alt_up is not None:
        shapes |= {
            f"{name}.{at}.weight": (hidden, hidden)
            for name in (COPY_PROJECTIONS, MERGE_PROJECTIONS)
            for at in range(config.alt_up.num - 1)
        }
    if config.streams is not None:
        shapes |= _stream_shapes(config.streams, HEAD_STREAMS, hidden)
    names = ExpertNames.of(config, stored)
    if not names.is_stacked and _num_experts(config) > len(stored):
        raise UnsupportedModel(
            f"the checkpoint has only {len(stored)} tensors, too few for the "
            f"{_num_experts(config)} experts of the config; each expert needs at "
            "least one tensor"
        )
    for i, spec in enumerate(config.layers):
        layer: Shapes = {f"{name}.weight": (hidden,) for name in norm_names(config, spec).values()}
        if spec.linear is not None:
            layer |= state_shapes(spec.linear, hidden, f"model.layers.{i}.linear_attn", stored)
        if spec.has_attention:
            layer |= _attention_shapes(config, spec, f"model.layers.{i}", stored)
        if spec.experts:
            layer |= names.shapes(spec.experts, hidden)
            if spec.experts.has_table:
                layer[names.table] = (config.vocab_size, spec.experts.top_k)
        elif spec.has_mlp:
            layer |= _mlp_shapes(config, "mlp", spec.inner or 0, f"model.layers.{i}", stored)
        if config.has_layer_scalars:
            layer["layer_scalar"] = (1,)
        if config.per_layer_inputs is not None:
            size = config.per_layer_inputs.size
            layer["per_layer_input_gate.weight"] = (size, hidden)
            layer["per_layer_projection.weight"] = (hidden, size)
            layer["post_per_layer_input_norm.weight"] = (hidden,)
        if config.alt_up is not None:
            layer |= _alt_up_shapes(config.alt_up, hidden)
        if config.streams is not None:
            for part in ("attn_hc.", "ffn_hc."):
                layer |= _stream_shapes(config.streams, part, hidden)
        if spec.experts and spec.experts.shared_inner:
            name = shared_mlp(spec.experts)
            inner = spec.experts.shared_inner
            layer |= _mlp_shapes(config, name, inner, f"model.layers.{i}", stored)
        if spec.experts and spec.experts.has_own_norms:
            layer |= {f"{name}.weight": (hidden,) for name in EXPERT_NORMS.values()}
            layer |= {ROUTER_SCALE: (hidden,), EXPERT_SCALES: (spec.experts.num,)}
        if spec.experts and spec.experts.has_shared_gate:
            layer["mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _num_experts(config: ModelConfig) -> int:
    return sum(spec.experts.num for spec in config.layers if spec.experts)


def norm_names(config: ModelConfig, spec: LayerSpec) -> dict[str, str]:
    """Maps the fields of `LayerWeights` that are norms of a layer to their names in checkpoints."""
    mixes = spec.has_attention or spec.linear is not None
    if config.norms == "single":
        return {"attention_norm" if mixes else "mlp_norm": "norm"}
    if config.norms != "after_attention":
        return NORMS[config.norms]
    return NORMS["after" if spec.has_attention else "before"]


def state_shapes(sizes: LinearAttention, hidden: int, name: str, stored: Collection[str]) -> Shapes:
    """Returns the shapes of a layer's linear attention `name`: the tables in this module's
    docstring."""
    if isinstance(sizes, GatedDelta):
        return _delta_shapes(sizes, hidden, name, stored)
    if isinstance(sizes, KimiDelta):
        return _kimi_delta_shapes(sizes, hidden)
    num_first = 3 * sizes.num_outputs
    shapes: Shapes = {"linear_attn.conv1d.weight": (sizes.num_channels, 1, sizes.kernel)}
    has_conv_bias = sizes.has_biases if isinstance(sizes, ShortConv) else sizes.has_conv_bias
    if has_conv_bias:
        shapes["linear_attn.conv1d.bias"] = (sizes.num_channels,)
    if isinstance(sizes, Mamba2):
        num_first = sizes.num_outputs + sizes.num_channels + sizes.num_heads
        for name in ("A_log", "D", "dt_bias"):
            shapes[f"linear_attn.{name}"] = (sizes.num_heads,)
        if sizes.has_norm:
            shapes["linear_attn.norm.weight"] = (sizes.num_outputs,)
    return shapes | _linear_shapes(
        {
            "linear_attn.in_proj": (num_first, hidden, sizes.has_biases),
            "linear_attn.out_proj": (hidden, sizes.num_outputs, sizes.has_biases),
        }
    )


def _delta_shapes(sizes: GatedDelta, hidden: int, layer: str, stored: Collection[str]) -> Shapes:
    """Returns the shapes of a layer's linear attention: the table in this module's docstring. The
    names in `stored` decide whether q, k, v and z are one matrix."""
    num_values = sizes.num_value_heads * sizes.value_dim
    if sizes.form == "apart":
        return _apart_shapes(sizes, hidden)
    outputs = {"qkv": sizes.num_channels, "z": num_values}
    if sizes.form == "joined" and f"{layer}.in_proj_qkv.weight" not in stored:
        outputs = {"qkvz": sizes.num_channels + num_values}
    if sizes.form == "joined":
        outputs["ba"] = 2 * sizes.num_value_heads
    else:
        outputs |= dict.fromkeys("ba", sizes.num_value_heads)
    return {
        f"linear_attn.in_proj_{name}.weight": (num, hidden) for name, num in outputs.items()
    } | {
        "linear_attn.conv1d.weight": (sizes.num_channels, 1, sizes.kernel),
        "linear_attn.A_log": (sizes.num_value_heads,),
        "linear_attn.dt_bias": (sizes.num_value_heads,),
        "linear_attn.norm.weight": (sizes.value_dim,),
        "linear_attn.out_proj.weight": (hidden, num_values),
    }


def _apart_shapes(sizes: GatedDelta, hidden: int) -> Shapes:
    shapes: Shapes = {}
    for part, num in zip("qkv", sizes.sections, strict=True):
        shapes[f"linear_attn.{part}_proj.weight"] = (num, hidden)
        shapes[f"linear_attn.{part}_conv1d.weight"] = (num, 1, sizes.kernel)
    for name in ("A_log", "dt_bias"):
        shapes[f"linear_attn.{name}"] = (sizes.num_value_heads,)
    for part in "ba":
        shapes[f"linear_attn.{part}_proj.weight"] = (sizes.num_value_heads, hidden)
    return shapes | {
        "linear_attn.g_proj.weight": (sizes.num_outputs, hidden),
        "linear_attn.norm.weight": (sizes.value_dim,),
        "linear_attn.out_proj.weight": (hidden, sizes.num_outputs),
    }


def _kimi_delta_shapes(sizes: KimiDelta, hidden: int) -> Shapes:
    outputs = sizes.num_outputs
    shapes: Shapes = {
        "self_attn.A_log": (1, 1, sizes.num_heads, 1),
        "self_attn.dt_bias": (outputs,),
        "self_attn.o_norm.weight": (sizes.dim,),
        "self_attn.b_proj.weight": (sizes.num_heads, hidden),
        "self_attn.o_proj.weight": (hidden, outputs),
    }
    for part in "qkv":
        shapes[f"self_attn.{part}_proj.weight"] = (outputs, hidden)
        shapes[f"self_attn.{part}_conv1d.weight"] = (outputs, 1, sizes.kernel)
    for part in "fg":
        shapes[f"self_attn.{part}_a_proj.weight"] = (sizes.dim, hidden)
        shapes[f"self_attn.{part}_b_proj.weight"] = (outputs, sizes.dim)
    return shapes


def _attention_shapes(
    config: ModelConfig, spec: LayerSpec, layer: str, stored: Collection[str]
) -> Shapes:
    """Returns the shapes of a layer's attention. `layer` is the name of the layer, such
    as model.layers.0."""
    hidden = config.hidden_size
    heads = config.heads_of(spec)
    head_dim = heads.dim
    if config.shared_kv is not None:
        return _shared_kv_shapes(config, config.shared_kv, spec)
    if config.latent is not None:
        of_latent = _latent_shapes(config, config.latent, layer, stored)
        return of_latent | _indexer_shapes(config, spec)
    q_size = config.num_attention_heads * head_dim
    kv_size = heads.num_kv * head_dim
    value_dim = config.value_dim or head_dim
    num_values = config.num_attention_heads * value_dim
    linears = {"self_attn.o_proj": (hidden, num_values, config.attention_out_bias)}
    if config.has_fused_qkv:
        linears["self_attn.qkv_proj"] = (q_size + 2 * kv_size, hidden, config.qkv_bias)
    else:
        # With gates, each head has its query and then its gate.
        q_out = q_size * 2 if config.has_attention_gates else q_size
        linears["self_attn.q_proj"] = (q_out, hidden, config.qkv_bias)
    if spec.kv_source is None and not config.has_fused_qkv:
        linears["self_attn.k_proj"] = (kv_size, hidden, config.qkv_bias)
        if not spec.values_are_keys:
            linears["self_attn.v_proj"] = (heads.num_kv * value_dim, hidden, config.qkv_bias)
    shapes: Shapes = {}
    if config.has_head_gates:
        shapes["self_attn.g_proj.weight"] = (config.num_attention_heads, hidden)
    if config.has_sinks and not spec.lacks_sinks:
        shapes["self_attn.sinks"] = (config.num_attention_heads,)
    if config.qk_norm and config.qk_norm != "rotated_plain":
        has_all = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (q_size if has_all else head_dim,)
        if spec.kv_source is None:
            shapes["self_attn.k_norm.weight"] = (kv_size if has_all else head_dim,)
    return shapes | _linear_shapes(linears) | _indexer_shapes(config, spec)


def _latent_shapes(
    config: ModelConfig, latent: Latent, layer: str, stored: Collection[str]
) -> Shapes:
    """Returns the shapes of a layer's latent attention: the table in this module's docstring. The
    names in `stored` decide between one matrix kv_b_proj and two matrices k_b_proj and v_b_proj."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    has_bias = config.qkv_bias
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if f"{layer}.{_KEYS}" in stored:
        shapes[_KEYS] = (heads, latent.kv_rank, latent.plain_dim)
        shapes[_VALUES] = (heads, latent.value_dim, latent.kv_rank)
    else:
        shapes[_WHOLE] = (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
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


def _indexer_shapes(config: ModelConfig, spec: LayerSpec) -> Shapes:
    if (indexer := spec.indexer) is None:
        return {}
    hidden, width = config.hidden_size, indexer.num_heads * indexer.dim
    shapes: Shapes = {"k_norm.weight": (indexer.dim,)}
    if config.latent is None:
        shapes["q_norm.weight"] = (indexer.dim,)
        shapes["q_proj.weight"] = (width, hidden)
        shapes["k_proj.weight"] = (indexer.dim, hidden)
    else:
        assert config.latent.q_rank is not None
        shapes["k_norm.bias"] = (indexer.dim,)
        shapes["wq_b.weight"] = (width, config.latent.q_rank)
        shapes["wk.weight"] = (indexer.dim, hidden)
        shapes["weights_proj.weight"] = (indexer.num_heads, hidden)
    return {f"self_attn.indexer.{name}": shape for name, shape in shapes.items()}


def _shared_kv_shapes(config: ModelConfig, sizes: SharedKv, spec: LayerSpec) -> Shapes:
    """Returns the shapes of a layer's attention and compressor: the table in this module's
    docstring."""
    hidden, dim = config.hidden_size, config.head_dim
    width = config.num_attention_heads * dim
    narrow = sizes.num_groups * sizes.out_rank
    shapes: Shapes = {
        "q_a_proj.weight": (sizes.q_rank, hidden),
        "q_a_norm.weight": (sizes.q_rank,),
        "q_b_proj.weight": (width, sizes.q_rank),
        "kv_proj.weight": (dim, hidden),
        "kv_norm.weight": (dim,),
        "o_a_proj.weight": (narrow, width // sizes.num_groups),
        "o_b_proj.weight": (hidden, narrow),
        "sinks": (config.num_attention_heads,),
    }
    if (compressor := spec.compressor) is not None:
        overlap = 1 if compressor.indexer is None else 2
        for part, entry_dim in zip(
            ("compressor", "compressor.indexer"), compressor.dims, strict=False
        ):
            shapes[f"{part}.kv_proj.weight"] = (overlap * entry_dim, hidden)
            shapes[f"{part}.gate_proj.weight"] = (overlap * entry_dim, hidden)
            shapes[f"{part}.position_bias"] = (compressor.rate, overlap * entry_dim)
            shapes[f"{part}.kv_norm.weight"] = (entry_dim,)
        if (indexer := compressor.indexer) is not None:
            heads = indexer.num_heads
            shapes["compressor.indexer.q_b_proj.weight"] = (heads * indexer.dim, sizes.q_rank)
            shapes["compressor.indexer.scorer.weights_proj.weight"] = (heads, hidden)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _stream_shapes(sizes: Streams, name: str, hidden: int) -> Shapes:
    num = sizes.num
    is_head = name == HEAD_STREAMS
    num_out = num if is_head else num * (2 + num)
    return {
        f"{name}fn": (num_out, num * hidden),
        f"{name}base": (num_out,),
        f"{name}scale": (1 if is_head else 3,),
    }


def _alt_up_shapes(sizes: AltUp, hidden: int) -> Shapes:
    return {
        "altup.correct_output_scale": (hidden,),
        "altup.correction_coefs.weight": (sizes.num, sizes.num),
        "altup.prediction_coefs.weight": (sizes.num**2, sizes.num),
        "altup.modality_router.weight": (sizes.num, hidden),
        "altup.router_norm.weight": (hidden,),
        "laurel.linear_left.weight": (sizes.laurel_rank, hidden),
        "laurel.linear_right.weight": (hidden, sizes.laurel_rank),
        "laurel.post_laurel_norm.weight": (hidden,),
    }


def _mlp_shapes(
    config: ModelConfig, name: str, inner: int, layer: str, stored: Collection[str]
) -> Shapes:
    """Returns the shapes of the MLP `name` of a layer. `inner` is its intermediate size; 0: the
    model's."""
    hidden = config.hidden_size
    has_bias = config.mlp_bias
    inner = inner or config.intermediate_size
    linears = {f"{name}.down_proj": (hidden, inner, has_bias)}
    is_fused = config.may_fuse_mlp and f"{layer}.{name}.gate_proj.weight" not in stored
    if config.has_fused_mlp or is_fused:
        linears[f"{name}.gate_up_proj"] = (2 * inner, hidden, has_bias)
    elif not config.has_gates:
        linears[f"{name}.up_proj"] = (inner, hidden, has_bias)
    else:
        linears[f"{name}.gate_proj"] = linears[f"{name}.up_proj"] = (inner, hidden, has_bias)
    return _linear_shapes(linears)


def _linear_shapes(linears: dict[str, tuple[int, int, bool]]) -> Shapes:
    """Returns the shapes of linear layers. `linears` maps names to (outputs, inputs, has a
    bias)."""
    shapes: Shapes = {}
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes
