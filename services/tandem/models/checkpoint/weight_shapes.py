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
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.errors import UnsupportedModel
from tandem.models.checkpoint.expert_names import ExpertNames, Shapes, shared_mlp
from tandem.models.config.latent import Latent
from tandem.models.config.layers import LayerSpec
from tandem.models.config.linear_attention import GatedDelta
from tandem.models.config.model import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# Tensors of the embeddings that a token has for each layer (`PerLayerInputs`).
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJECTION = "model.per_layer_model_projection.weight"
LAYER_NORM = "model.per_layer_projection_norm.weight"
# Value of `ModelConfig.norms` -> (field of LayerWeights -> name of the norm in checkpoints).
NORMS = {
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
_WHOLE, _KEYS, _VALUES = (f"self_attn.{part}_b_proj.weight" for part in ("kv", "k", "v"))


def expected_shapes(config: ModelConfig, stored: Collection[str]) -> Shapes:
    """Returns the shape of every tensor that a checkpoint of this model must have, by name. Where
    several naming schemes exist, the scheme of the names in `stored` applies. Raises
    UnsupportedModel if the config has more experts than the checkpoint has tensors."""
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    if config.per_layer_inputs is not None:
        width = config.num_layers * config.per_layer_inputs.size
        shapes[LAYER_EMBEDDING] = (config.per_layer_inputs.vocab_size, width)
        shapes[LAYER_PROJECTION] = (width, hidden)
        shapes[LAYER_NORM] = (config.per_layer_inputs.size,)
    names = ExpertNames.of(config, stored)
    if not names.is_stacked and _num_experts(config) > len(stored):
        raise UnsupportedModel(
            f"the config has {_num_experts(config)} experts in all layers together, which need at "
            f"least one tensor each, but the checkpoint has only {len(stored)} tensors"
        )
    for i, spec in enumerate(config.layers):
        layer = _norm_shapes(config) | (
            _delta_shapes(spec.linear, hidden, f"model.layers.{i}.linear_attn", stored)
            if spec.linear
            else _attention_shapes(config, spec, f"model.layers.{i}", stored)
        )
        layer |= (
            names.shapes(spec.experts, hidden)
            if spec.experts
            else _mlp_shapes(config, inner=spec.inner or 0)
        )
        if config.has_layer_scalars:
            layer["layer_scalar"] = (1,)
        if config.per_layer_inputs is not None:
            size = config.per_layer_inputs.size
            layer["per_layer_input_gate.weight"] = (size, hidden)
            layer["per_layer_projection.weight"] = (hidden, size)
            layer["post_per_layer_input_norm.weight"] = (hidden,)
        if spec.experts and spec.experts.shared_inner:
            layer |= _mlp_shapes(config, shared_mlp(spec.experts), spec.experts.shared_inner)
        if spec.experts and spec.experts.has_shared_gate:
            layer["mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _num_experts(config: ModelConfig) -> int:
    return sum(spec.experts.num for spec in config.layers if spec.experts)


def _norm_shapes(config: ModelConfig) -> Shapes:
    return {f"{name}.weight": (config.hidden_size,) for name in NORMS[config.norms].values()}


def _delta_shapes(sizes: GatedDelta, hidden: int, layer: str, stored: Collection[str]) -> Shapes:
    """Returns the shapes of a layer's linear attention: the table in this module's docstring. The
    names in `stored` decide whether q, k, v and z are one matrix."""
    num_values = sizes.num_value_heads * sizes.value_dim
    outputs = {"qkv": sizes.num_channels, "z": num_values}
    if sizes.is_joined and f"{layer}.in_proj_qkv.weight" not in stored:
        outputs = {"qkvz": sizes.num_channels + num_values}
    if sizes.is_joined:
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


def _attention_shapes(
    config: ModelConfig, spec: LayerSpec, layer: str, stored: Collection[str]
) -> Shapes:
    """Returns the shapes of a layer's attention. `layer` is the name of the layer, such
    as model.layers.0."""
    hidden = config.hidden_size
    heads = config.heads_of(spec)
    head_dim = heads.dim
    if config.latent is not None:
        return _latent_shapes(config, config.latent, layer, stored)
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
    if config.has_sinks and not spec.lacks_sinks:
        shapes["self_attn.sinks"] = (config.num_attention_heads,)
    if config.qk_norm and config.qk_norm != "rotated_plain":
        has_all = config.qk_norm == "all"
        shapes["self_attn.q_norm.weight"] = (q_size if has_all else head_dim,)
        if spec.kv_source is None:
            shapes["self_attn.k_norm.weight"] = (kv_size if has_all else head_dim,)
    return shapes | _linear_shapes(linears)


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


def _mlp_shapes(config: ModelConfig, name: str = "mlp", inner: int = 0) -> Shapes:
    hidden = config.hidden_size
    has_bias = config.mlp_bias
    inner = inner or config.intermediate_size
    linears = {f"{name}.down_proj": (hidden, inner, has_bias)}
    if config.has_fused_mlp:
        linears[f"{name}.gate_up_proj"] = (2 * inner, hidden, has_bias)
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
