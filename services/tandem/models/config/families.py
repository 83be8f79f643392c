"""The table of supported architectures. A key of the table is the name of an architecture in
config.json.

A row states the properties that all models of an architecture share, and defaults for the keys that
config.json may leave out. model.py and layers.py read the other properties from config.json.
docs/adding_a_model.md shows how to add a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["before", "after", "after_attention", "around", "around_glm", "parallel", "single"]
QkNorm = Literal["", "head", "all", "rotated", "rotated_plain"]
Linear = Literal[
    "",
    "gated_delta",
    "gated_delta_joined",
    "gated_delta_apart",
    "kimi_delta",
    "short_conv",
    "mamba2",
]
Windows = Literal["none", "all", "switched", "chosen", "pattern", "chunked"]
ExpertForm = Literal[
    "", "mixtral", "qwen", "gpt_oss", "deepseek", "kimi", "llama4", "granite", "nemotron"
]
# Experts that are chosen and computed as DeepSeek's.
LIKE_DEEPSEEK: tuple[ExpertForm, ...] = ("deepseek", "kimi", "nemotron")
Fused = Literal["", "mlp", "maybe_mlp", "all"]
ExpertLayers = Literal["all", "steps", "from", "types", "range", "kinds", "listed", "switched"]
Indexers = Literal["", "own", "shared", "blocks"]


@dataclass(frozen=True, slots=True)
class Family:
    """The properties that models of one architecture share. The defaults are Llama's.

    norms: the positions of the RMSNorms of attention and of the MLP:
        "before": on the input;
        "after": on the output, before the residual is added;
        "after_attention": as "after" in layers with attention, as "before" in layers with a state;
        "around": on both;
        "around_glm": on both, with the tensor names of GLM 4;
        "parallel": one norm on the input of both: the MLP reads the residual stream before the
            output of attention is added (Cohere);
        "single": one norm on the input of a layer that has only one part (Nemotron-H).
    centers_norms: norms of the residual stream are LayerNorms without biases, not RMSNorms.
    norm_offset: a number added to the stored weights of norms: 1 for Gemma, otherwise 0.
    qk_norm: RMSNorm of q and k, before RoPE if nothing else is said:
        "": none;
        "head": over each head;
        "all": over all heads together;
        "rotated": over each head, after RoPE;
        "rotated_plain": over each head, after RoPE, without weights, in layers with RoPE only.
    qk_norm_key: the key of config.json that turns these norms on; empty: they are always on.
    biases: the linear layers of attention that have biases:
        "config": q, k, v and the output, if `attention_bias` is true;
        "config_qkv": q, k and v if `attention_bias` is true, the output never;
        "config_apart": q, k and v if `attention_bias` is true, the output if `attention_out_bias`
            is true;
        "qkv": q, k and v always, the output never;
        "none": none.
    windows: the layers that have a window of `sliding_window` tokens:
        "none": none;
        "all": all;
        "switched": all if `use_sliding_window` is true, else none;
        "chosen": if `use_sliding_window` is true, the layers that `layer_types` names; otherwise
            none. If `layer_types` is absent: in families with `has_no_rope_layers` the layers
            without RoPE, in other families the layers from number `max_window_layers` on;
        "pattern": the layers that `layer_types` names. Without `layer_types`, all but every n-th
            layer, where n is `sliding_window_pattern`. With 6, layers 0 to 4 have a window, and
            layer 5 has none;
        "chunked": no sliding windows. The layers that `layer_types` names, or without it those with
            RoPE, attend within chunks of `attention_chunk_size` tokens.
    pattern: the default of `sliding_window_pattern`.
    rope_theta: the default of `rope_theta`.
    local_rope_theta: the same for layers with a window, with `has_rope_by_kind`.
    has_rope_by_kind: layers with a window and layers without one have different RoPE parameters.
    has_no_rope_layers: some layers have no RoPE (`no_rope_layers`).
    rope_if: the condition under which layers have RoPE:
        "": always;
        "named": `position_embedding_type` is "rope";
        "given": `rope_theta` of `rope_parameters` is not null;
        "never": no layer has RoPE.
    rope_in_windows: whether only the layers with a window have RoPE:
        "": no;
        "or_all": yes; if `sliding_window` is null, all layers have RoPE;
        "only": yes, and `sliding_window` must not be null.
    query_scaling: the layers in which a factor that grows with the position multiplies the queries:
        "": none;
        "all": all (`llama_4_scaling_beta` of the RoPE parameters);
        "no_rope": those without RoPE, if `attn_temperature_tuning` is true.
    has_rope_pairs: RoPE rotates element 2 i of a head with element 2 i + 1. In other families it
        rotates element i with element i + D / 2, where D is the number of rotated elements.
    fused: the matrices that checkpoints store as one:
        "": none;
        "mlp": gate and up;
        "maybe_mlp": gate and up in some checkpoints, none in others;
        "all": gate and up, and also q, k and v.
    has_partial_rope: RoPE may rotate only a part of each head (`partial_rotary_factor`). With
        latent attention, the factor must be the rotated part of a query.
    scalings: the supported kinds of RoPE scaling (`RopeScaling`).
    is_length_scaled: `max_position_embeddings` is always the context after RoPE scaling. In other
        families this depends on the kind of scaling (`RopeScaling.max_model_len`).
    activation_key: the key of config.json that names the activation of the MLP.
    multipliers: constant factors in the decoder:
        "": none;
        "granite": the factors in keys such as `embedding_multiplier`;
        "gemma": embeddings are multiplied by the square root of the hidden size, and scores are
            divided by the square root of `query_pre_attn_scalar`;
        "gemma3n": as "gemma", but scores are not divided;
        "cohere": logits are multiplied by `logit_scale`;
        "falcon_h1": the factors in keys such as `lm_head_multiplier` (falcon_h1.py).
    experts: the naming of the experts' config keys and tensors; empty: there are no experts.
    expert_layers: the layers that have experts:
        "all": all;
        "steps": every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`;
        "from": the layers from number `first_k_dense_replace` on;
        "types": those that `mlp_layer_types` calls "sparse"; without it, as "from";
        "range": every `moe_layer_interval`-th layer from `moe_layer_start_index` to
            `moe_layer_end_index` (-1: the last layer);
        "kinds": those that `layer_types` calls "moe";
        "listed": those in `moe_layers`; without it, every `interleave_moe_layer_step`-th layer;
        "switched": all if `enable_moe_block` is true, else none.
    has_shared_gate: layers with experts have one shared expert, whose output is multiplied by the
        sigmoid of a learned gate.
    has_sigmoids: the score of an expert is the sigmoid of its logit instead of a softmax.
    is_corrected: experts are chosen by their score plus a learned bias.
    weighs_inputs: the weight of an expert multiplies its input instead of its output.
    has_mimo_layers: the layers are MiMo V2's: those with a window have twice as many KV heads, and
        only these have attention sinks; values have a size of their own (`v_head_dim`) and are
        multiplied by `attention_value_scale`; the first layer never has a window.
    has_rotary_dim: `rotary_dim` is the number of rotated elements of a head, if nothing else says.
    has_gemma4_layers: the layers are Gemma 4's: those without a window have heads of their own
        (`global_head_dim`), the last ones read the KV of earlier layers (`num_kv_shared_layers`),
        values are normalized, and each layer has a scalar and may have embeddings of its own. Its
        experts and its dense MLP are side by side, with norms of their own.
    has_alt_up: the layers are Gemma 3n's (gemma3n.py).
    has_deepseek_v4_layers: the layers are DeepSeek V4's (deepseek_v4.py).
    is_latent: attention is latent (latent.py).
    indexer: the layers that have an indexer, which chooses the tokens to which a query attends
        (indexer.py):
        "": none; queries attend to all earlier tokens;
        "own": all;
        "shared": those that `indexer_types` calls "full"; the others use their choices. RoPE
            rotates element 2 i of the indexer's heads with element 2 i + 1;
        "blocks": those that `layer_types` calls "minimax_m3_sparse". They choose blocks of
            `index_block_size` tokens.
    linear: the kind of the layers that keep a state in place of keys and values, which
        `layer_types` calls by `linear_name`. Without `layer_types`, `full_attn_idxs` lists the
        layers that have full attention; without it, every `full_attention_interval`-th layer does,
        if the family has this key.
        "": the family has no such layers;
        "gated_delta": Gated DeltaNet (linear_attention.py), whose checkpoints have a matrix for
            each of q with k and v, z, b and a;
        "gated_delta_joined": Gated DeltaNet, whose checkpoints have one matrix for q, k, v and z,
            and one for b and a;
        "gated_delta_apart": Gated DeltaNet of OLMo Hybrid, whose checkpoints have a matrix for each
            of q, k, v, z, b and a;
        "kimi_delta": Kimi Delta Attention. `linear_attn_config` has the sizes and the numbers of
            the layers, from 1 on (kimi_linear.py);
        "short_conv": short convolutions;
        "mamba2": Mamba 2.
    has_parallel_state: each layer has attention and a state (Falcon-H1). Both read the same input,
        and their outputs are added.
    has_single_parts: a layer is either attention, or a state, or an MLP, or experts, as
        `layer_types` says (Nemotron-H). `hybrid_override_pattern` has a letter for each layer, if
        `layer_types` is absent.
    lacks_gates: MLPs and experts have no gates: down . activation(up).
    linear_name: the name in `layer_types` of the layers that keep a state.
    has_attention_gates: the output of attention is multiplied by the sigmoid of a gate. The matrix
        q_proj computes the gates too: for each head the query, then the gate.
    has_head_gates: the output of each head is multiplied by the sigmoid of a gate, which a matrix
        g_proj computes.
    has_extra_layers: checkpoints may have additional layers for multi-token prediction
        (`num_nextn_predict_layers`), which are not run.
    has_sinks: each head has an attention sink: a learned score that the softmax over the head's
        attention scores includes. No value vector belongs to this score.
    has_clamped_gates: the gate and up projections are clamped to `swiglu_limit`.
    quantization: a `quant_method` that only checkpoints of this family may have. The methods that
        all families may have are in quantization.py.
    has_caps: logits and attention scores may be soft-capped (`final_logit_softcapping` and
        `attn_logit_softcapping`).
    key_names: name of a key of config.json in this package -> name that it has in this family.
    tensor_names: part of the name of a tensor in this family's checkpoints -> the part that stands
        there in this package. ^ stands for the beginning of the name. Rules apply one after the
        other.
    refuses: keys that must be absent, null or false.
    demands: keys that must be absent or have one of the values listed for the key.
    defaults: values of keys that are absent from config.json.
    """

    norms: Norms = "before"
    norm_offset: float = 0.0
    centers_norms: bool = False
    qk_norm: QkNorm = ""
    qk_norm_key: str = ""
    biases: Literal["config", "config_qkv", "config_apart", "qkv", "none"] = "config"
    windows: Windows = "none"
    pattern: int = 1
    rope_theta: float = 10000.0
    local_rope_theta: float = 10000.0
    has_rope_by_kind: bool = False
    has_no_rope_layers: bool = False
    rope_if: Literal["", "named", "given", "never"] = ""
    rope_in_windows: Literal["", "or_all", "only"] = ""
    query_scaling: Literal["", "all", "no_rope"] = ""
    has_rope_pairs: bool = False
    fused: Fused = ""
    has_partial_rope: bool = False
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    is_length_scaled: bool = False
    activation_key: str = "hidden_act"
    multipliers: Literal["", "granite", "gemma", "gemma3n", "cohere", "falcon_h1"] = ""
    experts: ExpertForm = ""
    expert_layers: ExpertLayers = "all"
    has_shared_gate: bool = False
    has_sigmoids: bool = False
    is_corrected: bool = False
    weighs_inputs: bool = False
    has_mimo_layers: bool = False
    has_rotary_dim: bool = False
    has_gemma4_layers: bool = False
    has_alt_up: bool = False
    has_deepseek_v4_layers: bool = False
    is_latent: bool = False
    indexer: Indexers = ""
    linear: Linear = ""
    linear_name: str = "linear_attention"
    has_parallel_state: bool = False
    has_single_parts: bool = False
    lacks_gates: bool = False
    has_attention_gates: bool = False
    has_head_gates: bool = False
    has_extra_layers: bool = False
    has_sinks: bool = False
    has_clamped_gates: bool = False
    quantization: str = ""
    has_caps: bool = False
    key_names: Mapping[str, str] = field(default_factory=dict)
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

# Qwen3-Next and Qwen3.5: three of four layers have linear attention.
_QWEN_LINEAR: Mapping[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": "head",
    "has_partial_rope": True,
    "has_attention_gates": True,
    "refuses": ("attention_bias",),
}
_QWEN_LINEAR_DEFAULTS = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

# DeepSeek V4 as DeepSeek names its tensors, and as transformers writes them.
_DEEPSEEK_V4_NAMES = {
    "^embed.": "model.embed_tokens.",
    "^head.": "lm_head.",
    "^norm.": "model.norm.",
    "^layers.": "model.layers.",
    "^hc_head_": "model.hc_head.hc_",
    ".attn.indexer.compressor.wkv.": ".self_attn.compressor.indexer.kv_proj.",
    ".attn.indexer.compressor.wgate.": ".self_attn.compressor.indexer.gate_proj.",
    ".attn.indexer.compressor.norm.": ".self_attn.compressor.indexer.kv_norm.",
    ".attn.indexer.compressor.ape": ".self_attn.compressor.indexer.position_bias",
    ".attn.indexer.weights_proj.": ".self_attn.compressor.indexer.scorer.weights_proj.",
    ".attn.indexer.wq_b.": ".self_attn.compressor.indexer.q_b_proj.",
    ".attn.compressor.wkv.": ".self_attn.compressor.kv_proj.",
    ".attn.compressor.wgate.": ".self_attn.compressor.gate_proj.",
    ".attn.compressor.norm.": ".self_attn.compressor.kv_norm.",
    ".attn.compressor.ape": ".self_attn.compressor.position_bias",
    ".attn.attn_sink": ".self_attn.sinks",
    ".attn.wq_a.": ".self_attn.q_a_proj.",
    ".attn.wq_b.": ".self_attn.q_b_proj.",
    ".attn.q_norm.": ".self_attn.q_a_norm.",
    ".attn.wkv.": ".self_attn.kv_proj.",
    ".attn.norm.": ".self_attn.kv_norm.",  # written by transformers
    ".attn.kv_norm.": ".self_attn.kv_norm.",
    ".attn.wo_a.": ".self_attn.o_a_proj.",
    ".attn.wo_b.": ".self_attn.o_b_proj.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".hc_attn_base": ".attn_hc.base",
    ".hc_attn_fn": ".attn_hc.fn",
    ".hc_attn_scale": ".attn_hc.scale",
    ".hc_ffn_base": ".ffn_hc.base",
    ".hc_ffn_fn": ".ffn_hc.fn",
    ".hc_ffn_scale": ".ffn_hc.scale",
    ".ffn.": ".mlp.",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}

# LFM2 and later: short convolutions beside attention.
_LFM: Mapping[str, Any] = {
    "rope_theta": 1000000.0,
    "linear": "short_conv",
    "linear_name": "conv",
    "qk_norm": "head",
}
_LFM_DEFAULTS = {
    "conv_L_cache": 3,
    "full_attention_interval": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LFM_NAMES = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".conv.conv.": ".linear_attn.conv1d.",
    ".conv.": ".linear_attn.",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
_LFM2_NAMES = _LFM_NAMES | {
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
}
_LFM_KEYS = {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"}

# Granite 4 and others: Mamba 2.
_MAMBA_DEFAULTS = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

# transformers' defaults for DeepSeek V2 and V3.
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = _DEEPSEEK | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
_DEEPSEEK_V3_DEMANDS = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
# DeepSeek V3.2 and GLM 5: transformers always rotates neighbouring elements of keys.
_SPARSE_DEMANDS = _DEEPSEEK_V3_DEMANDS | {"rope_interleave": (True,)}

# Routing without groups, in families for which transformers does not read the keys of groups.
_NO_GROUPS = {"n_group": (1,), "topk_group": (1,)}
# Routing whose weights are always normalized.
_NORMALIZED = _NO_GROUPS | {"norm_topk_prob": (True,)}
_NORMALIZED_DEFAULTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}

# transformers' defaults for GLM 4.5 to 4.7.
_GLM = {
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(biases="qkv", windows="chosen", defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family(
        qk_norm="head", windows="chosen", defaults={"head_dim": 128, "sliding_window": 4096}
    ),
    "MixtralForCausalLM": Family(
        windows="all",
        biases="none",
        rope_theta=1000000.0,
        experts="mixtral",
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head",
        windows="switched",
        experts="qwen",
        expert_layers="steps",
        defaults={
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        **_QWEN_LINEAR,
        experts="qwen",
        expert_layers="steps",
        has_shared_gate=True,
        linear="gated_delta_joined",
        defaults=_QWEN_LINEAR_DEFAULTS
        | {
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
        },
    ),
    "Qwen3_5ForCausalLM": Family(
        **_QWEN_LINEAR, linear="gated_delta", defaults=_QWEN_LINEAR_DEFAULTS
    ),
    "Qwen3_5MoeForCausalLM": Family(
        **_QWEN_LINEAR,
        experts="qwen",
        has_shared_gate=True,
        linear="gated_delta",
        defaults=_QWEN_LINEAR_DEFAULTS
        | {
            "intermediate_size": 512,  # of no layer
            "norm_topk_prob": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "GptOssForCausalLM": Family(
        windows="pattern",
        pattern=2,
        rope_theta=150000.0,
        is_length_scaled=True,
        experts="gpt_oss",
        has_sinks=True,
        has_clamped_gates=True,
        quantization="mxfp4",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _GPT_OSS_ROPE,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        experts="deepseek",
        expert_layers="from",
        # Implementations disagree: transformers ignores norm_topk_prob, the models' own code does
        # not.
        refuses=("norm_topk_prob",),
        demands={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "moe_layer_freq": (1,),
            "rope_interleave": (True,),
        },
        defaults=_DEEPSEEK
        | {
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        experts="deepseek",
        expert_layers="from",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        demands=_DEEPSEEK_V3_DEMANDS,
        defaults=_DEEPSEEK_V3,
    ),
    "KimiLinearForCausalLM": Family(
        is_latent=True,
        rope_if="never",
        linear="kimi_delta",
        experts="kimi",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        key_names={
            "max_position_embeddings": "model_max_length",
            "n_group": "num_expert_group",
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
            "num_experts_per_tok": "num_experts_per_token",
        },
        tensor_names={".block_sparse_moe.": ".mlp."},
        refuses=("rope_parameters", "rope_scaling"),
        demands={
            "mla_use_nope": (True,),
            "moe_layer_freq": (1,),
            "moe_router_activation_func": ("sigmoid",),
            "use_grouped_topk": (True,),
        },
        defaults=_DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "max_position_embeddings": 1048576,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
        },
    ),
    "DeepseekV32ForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        indexer="own",
        experts="deepseek",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        demands=_SPARSE_DEMANDS,
        defaults=_DEEPSEEK_V3 | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    ),
    "GlmMoeDsaForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        indexer="shared",
        experts="deepseek",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        demands=_SPARSE_DEMANDS,
        defaults=_DEEPSEEK_V3
        | {
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "n_group": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "topk_group": 1,
            "v_head_dim": 256,
        },
    ),
    "DeepseekV4ForCausalLM": Family(
        windows="all",
        biases="none",
        has_rope_by_kind=True,
        has_partial_rope=True,
        scalings=("yarn",),
        is_length_scaled=True,
        experts="deepseek",
        is_corrected=True,
        has_deepseek_v4_layers=True,
        has_extra_layers=True,
        has_sinks=True,
        has_clamped_gates=True,
        key_names={"intermediate_size": "moe_intermediate_size"},
        tensor_names=_DEEPSEEK_V4_NAMES,
        refuses=("attention_bias", "mlp_bias", "quantization_config", "expert_dtype"),
        demands={
            "hidden_act": ("silu", "swish"),
            "n_group": (1,),
            "n_shared_experts": (1,),
            "norm_topk_prob": (True,),
            "num_key_value_heads": (1,),
            "scoring_func": ("sqrtsoftplus",),
            "topk_group": (1,),
        },
        defaults={
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "head_dim": 512,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "intermediate_size": 2048,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 1,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "q_lora_rank": 1024,
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 1.5,
            "sliding_window": 128,
            "topk_group": 1,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        windows="chosen",
        rope_theta=2000000.0,
        has_no_rope_layers=True,
        defaults={"tie_word_embeddings": True},
    ),
    "Olmo2ForCausalLM": Family(norms="after", qk_norm="all", defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(
        norms="after",
        qk_norm="all",
        windows="pattern",
        pattern=4,
        rope_theta=500000.0,
        has_rope_by_kind=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_local_base_freq": 500000.0,
            "sliding_window": 4096,
        },
    ),
    "OlmoHybridForCausalLM": Family(
        norms="after_attention",
        qk_norm="all",
        rope_if="given",
        linear="gated_delta_apart",
        tensor_names={
            ".linear_attn.o_norm.": ".linear_attn.norm.",
            ".linear_attn.o_proj.": ".linear_attn.out_proj.",
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
        },
        defaults={"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
    ),
    "GraniteForCausalLM": Family(multipliers="granite"),
    "GraniteMoeHybridForCausalLM": Family(
        multipliers="granite",
        rope_if="named",
        linear="mamba2",
        experts="granite",
        fused="mlp",
        key_names={"layer_types": "layers_block_type"},
        tensor_names={
            ".mamba.": ".linear_attn.",
            ".shared_mlp.": ".mlp.shared_experts.",
            ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
            ".block_sparse_moe.router.layer.": ".mlp.gate.",
            ".input_linear.": ".gate_up_proj.",
            ".output_linear.": ".down_proj.",
        },
        defaults=_MAMBA_DEFAULTS
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
        },
    ),
    "FalconH1ForCausalLM": Family(
        multipliers="falcon_h1",
        linear="mamba2",
        has_parallel_state=True,
        tensor_names={
            "model.final_layernorm.": "model.norm.",
            ".pre_ff_layernorm.": ".post_attention_layernorm.",
            ".feed_forward.": ".mlp.",
            ".mamba.": ".linear_attn.",
        },
        refuses=("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias"),
        defaults=_MAMBA_DEFAULTS
        | {"mamba_d_ssm": 1024, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "NemotronHForCausalLM": Family(
        norms="single",
        biases="none",
        rope_if="never",
        activation_key="mlp_hidden_act",
        linear="mamba2",
        has_single_parts=True,
        lacks_gates=True,
        experts="nemotron",
        expert_layers="kinds",
        has_sigmoids=True,
        is_corrected=True,
        key_names={
            "layer_types": "layers_block_type",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_d_conv": "conv_kernel",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_proj_bias": "use_bias",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        tensor_names={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.": "model.",
            **{
                f".mixer.{part}": f".linear_attn.{part}"
                for part in ("A_log", "D", "conv1d.", "dt_bias", "in_proj.", "norm.", "out_proj.")
            },
            **{f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"},
            ".mixer.": ".mlp.",
        },
        refuses=("moe_latent_size",),
        demands={"mamba_hidden_act": ("silu",)},
        defaults=_MAMBA_DEFAULTS
        | {
            "head_dim": 128,
            "intermediate_size": 21504,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 8,
            "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "n_routed_experts": 8,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
    ),
    "Lfm2ForCausalLM": Family(
        **_LFM,
        biases="none",
        key_names=_LFM_KEYS | {"intermediate_size": "block_ff_dim"},
        tensor_names=_LFM2_NAMES,
        defaults=_LFM_DEFAULTS
        | {
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
    ),
    "Lfm2MoeForCausalLM": Family(
        **_LFM,
        biases="none",
        experts="deepseek",
        expert_layers="from",
        has_sigmoids=True,
        is_corrected=True,
        key_names=_LFM_KEYS
        | {"first_k_dense_replace": "num_dense_layers", "n_routed_experts": "num_experts"},
        tensor_names={".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias"}
        | _LFM2_NAMES,
        demands=_NO_GROUPS | {"use_expert_bias": (True,)},
        defaults=_LFM_DEFAULTS
        | {
            "first_k_dense_replace": 2,
            "moe_intermediate_size": 1792,
            "n_group": 1,
            "n_routed_experts": 32,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "topk_group": 1,
        },
    ),
    "Lfm3ForCausalLM": Family(
        **_LFM,
        norms="around",
        windows="pattern",
        has_rope_by_kind=True,
        local_rope_theta=1000000.0,
        scalings=(*Family().scalings, "proportional"),
        is_length_scaled=True,
        has_head_gates=True,
        key_names=_LFM_KEYS,
        tensor_names=_LFM_NAMES
        | {
            ".post_operator_norm.": ".post_attention_layernorm.",
            ".ffn_norm.": ".pre_feedforward_layernorm.",
            ".post_ffn_norm.": ".post_feedforward_layernorm.",
            ".self_attn.gate_proj.": ".self_attn.g_proj.",
        },
        demands={"use_attention_gate": (True,), "use_sandwich_norm": (True,)},
        defaults={
            "conv_L_cache": 7,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1000000.0,
                },
            },
            "sliding_window": 256,
            "tie_word_embeddings": True,
        },
    ),
    "Phi3ForCausalLM": Family(
        biases="none",
        windows="all",
        fused="all",
        has_partial_rope=True,
        scalings=("longrope",),
        is_length_scaled=True,
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": Family(
        norms="around",
        norm_offset=1.0,
        windows="pattern",
        pattern=2,
        activation_key="hidden_activation",
        multipliers="gemma",
        has_caps=True,
        refuses=("use_bidirectional_attention",),
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Family(
        norms="around",
        norm_offset=1.0,
        qk_norm="head",
        windows="pattern",
        pattern=6,
        rope_theta=1000000.0,
        has_rope_by_kind=True,
        is_length_scaled=True,
        activation_key="hidden_activation",
        multipliers="gemma",
        has_caps=True,
        # Implementations disagree: transformers ignores attn_logit_softcapping, others do not.
        refuses=("attn_logit_softcapping", "use_bidirectional_attention"),
        defaults=_GEMMA,
    ),
    "GlmForCausalLM": Family(
        biases="config_qkv",
        has_rope_pairs=True,
        has_partial_rope=True,
        fused="mlp",
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "Glm4ForCausalLM": Family(
        norms="around_glm",
        biases="config_qkv",
        has_rope_pairs=True,
        has_partial_rope=True,
        fused="mlp",
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
    ),
    "Glm4MoeForCausalLM": Family(
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        biases="config_qkv",
        has_partial_rope=True,
        experts="deepseek",
        expert_layers="from",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        defaults=_GLM
        | {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Glm4MoeLiteForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        experts="deepseek",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        defaults=_GLM
        | {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.8,
            "v_head_dim": 256,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="all",
        biases="none",
        rope_theta=5000000.0,
        has_partial_rope=True,
        has_rotary_dim=True,
        experts="mixtral",
        has_sigmoids=True,
        is_corrected=True,
        tensor_names={
            ".block_sparse_moe.e_score_correction_bias": (
                ".block_sparse_moe.gate.e_score_correction_bias"
            )
        },
        defaults={"head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256},
    ),
    "MiniMaxM3VLForCausalLM": Family(
        norm_offset=1.0,
        qk_norm="head",
        biases="none",
        rope_theta=5000000.0,
        has_partial_rope=True,
        indexer="blocks",
        experts="mixtral",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        has_clamped_gates=True,
        fused="maybe_mlp",
        tensor_names={
            ".block_sparse_moe.e_score_correction_bias": (
                ".block_sparse_moe.gate.e_score_correction_bias"
            ),
            ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
            **{
                f".self_attn.index_{part}.": f".self_attn.indexer.{part}."
                for part in ("q_proj", "k_proj", "q_norm", "k_norm")
            },
        },
        defaults={
            "dense_intermediate_size": 12288,
            "first_k_dense_replace": 0,
            "head_dim": 128,
            "hidden_act": "silu",
            "index_block_size": 128,
            "index_head_dim": 128,
            "index_local_blocks": 1,
            "index_n_heads": 4,
            "index_topk_blocks": 16,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "routed_scaling_factor": 2.0,
            "shared_intermediate_size": 3072,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    "SeedOssForCausalLM": Family(
        biases="config_apart", defaults={"attention_bias": True, "head_dim": 128}
    ),
    "Exaone4ForCausalLM": Family(
        norms="after",
        qk_norm="head",
        biases="none",
        windows="pattern",
        pattern=4,
        rope_in_windows="or_all",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "Ernie4_5ForCausalLM": Family(
        rope_theta=500000.0,
        has_rope_pairs=True,
        key_names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        biases="none",
        rope_theta=500000.0,
        has_rope_pairs=True,
        experts="deepseek",
        expert_layers="range",
        is_corrected=True,
        key_names={
            "n_routed_experts": "moe_num_experts",
            "n_shared_experts": "moe_num_shared_experts",
            "num_experts_per_tok": "moe_k",
        },
        tensor_names={
            ".mlp.moe_statics.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"
        },
        refuses=("use_bias",),
        demands=_NORMALIZED | {"moe_norm_min": (1e-12,), "routed_scaling_factor": (1.0,)},
        defaults=_NORMALIZED_DEFAULTS
        | {
            "moe_intermediate_size": 1536,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "HYV3ForCausalLM": Family(
        qk_norm="head",
        rope_theta=11158840.0,
        experts="deepseek",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        has_extra_layers=True,
        key_names={
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "router_scaling_factor",
        },
        tensor_names={
            ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.router.gate.": ".mlp.gate.",
            ".mlp.shared_mlp.": ".mlp.shared_experts.",
        },
        demands=_NORMALIZED,
        defaults=_NORMALIZED_DEFAULTS
        | {
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 192,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.826,
        },
    ),
    "Cohere2ForCausalLM": Family(
        norms="parallel",
        centers_norms=True,
        windows="pattern",
        pattern=4,
        rope_in_windows="only",
        has_rope_pairs=True,
        multipliers="cohere",
        key_names={"rms_norm_eps": "layer_norm_eps"},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True},
    ),
    "Ministral3ForCausalLM": Family(
        biases="none",
        windows="all",
        is_length_scaled=True,
        query_scaling="all",
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "Mistral4ForCausalLM": Family(
        is_latent=True,
        is_length_scaled=True,
        has_partial_rope=True,
        query_scaling="all",
        experts="deepseek",
        expert_layers="from",
        # With one group, the experts need no sums of two scores of a group.
        demands=_NO_GROUPS,
        defaults={
            "first_k_dense_replace": 0,
            "kv_lora_rank": 256,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "topk_group": 1,
            "v_head_dim": 128,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        qk_norm="rotated",
        scalings=("linear", "llama3", "yarn", "alpha"),
        tensor_names={".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        qk_norm="rotated",
        scalings=("linear", "llama3", "yarn", "alpha"),
        experts="deepseek",
        key_names={
            "moe_intermediate_size": "intermediate_size",
            "n_routed_experts": "num_experts",
            "num_experts_per_tok": "moe_topk",
        },
        tensor_names={
            ".query_layernorm.": ".q_norm.",
            ".key_layernorm.": ".k_norm.",
            ".mlp.gate.wg.": ".mlp.gate.",
            ".mlp.shared_mlp.": ".mlp.shared_experts.",
        },
        demands=_NORMALIZED | {"n_shared_experts": (1,), "routed_scaling_factor": (1.0,)},
        defaults=_NORMALIZED_DEFAULTS
        | {
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Llama4ForCausalLM": Family(
        qk_norm="rotated_plain",
        qk_norm_key="use_qk_norm",
        windows="chunked",
        rope_theta=500000.0,
        has_no_rope_layers=True,
        has_rope_pairs=True,
        query_scaling="no_rope",
        experts="llama4",
        expert_layers="listed",
        has_sigmoids=True,
        weighs_inputs=True,
        key_names={
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
            "n_routed_experts": "num_local_experts",
        },
        tensor_names={
            ".feed_forward.router.": ".mlp.gate.",
            ".feed_forward.shared_expert.": ".mlp.shared_experts.",
            ".feed_forward.": ".mlp.",
        },
        demands={"norm_topk_prob": (False,)},
        defaults={
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "head_dim": 128,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 16384,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
        },
    ),
    "Gemma3nForCausalLM": Family(
        norms="around",
        qk_norm="head",
        windows="pattern",
        pattern=5,
        rope_theta=1000000.0,
        has_rope_by_kind=True,
        is_length_scaled=True,
        activation_key="hidden_activation",
        multipliers="gemma3n",
        has_caps=True,
        has_alt_up=True,
        refuses=("attn_logit_softcapping", "use_bidirectional_attention"),
        defaults={
            "altup_active_idx": 0,
            "altup_num_inputs": 4,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "num_kv_shared_layers": 15,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "Gemma4ForCausalLM": Family(
        norms="around",
        qk_norm="head",
        windows="pattern",
        pattern=6,
        has_rope_by_kind=True,
        scalings=(*Family().scalings, "proportional"),
        is_length_scaled=True,
        activation_key="hidden_activation",
        multipliers="gemma",
        has_caps=True,
        has_gemma4_layers=True,
        experts="qwen",
        expert_layers="switched",
        key_names={"num_experts_per_tok": "top_k_experts"},
        tensor_names={".router.proj.": ".mlp.gate.", ".experts.": ".mlp.experts."},
        refuses=("attn_logit_softcapping",),
        demands={
            "norm_topk_prob": (True,),
            "query_pre_attn_scalar": (1,),
            "use_bidirectional_attention": (None, "vision"),
        },
        defaults={
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 256,
            "norm_topk_prob": True,
            "query_pre_attn_scalar": 1,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                },
            },
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
    "MiMoV2FlashForCausalLM": Family(
        biases="config_qkv",
        windows="pattern",
        pattern=6,
        has_rope_by_kind=True,
        has_partial_rope=True,
        has_sinks=True,
        has_mimo_layers=True,
        experts="deepseek",
        expert_layers="types",
        has_sigmoids=True,
        is_corrected=True,
        demands={"partial_rotary_factor": (0.334,)},
        defaults={
            "attention_value_scale": 0.707,
            "first_k_dense_replace": 1,
            "head_dim": 192,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 256,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": 0.334,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "sliding_window": 129,
            "topk_group": 1,
            "v_head_dim": 128,
        },
        tensor_names={".attention_sink_bias": ".sinks"},
    ),
}
