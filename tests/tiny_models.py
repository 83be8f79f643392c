"""Small checkpoints with random weights, one for each feature that the decoder must support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder, resolve

_SIZES = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    "attention_factor": 1.2,
}
_DEEPSEEK = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "first_k_dense_replace": 1,
}
# An indexer chooses 24 tokens. It has so many heads that scores are never 0, because transformers
# does not take the first of equal scores.
_INDEXER = {
    "q_lora_rank": 28,
    "index_n_heads": 16,
    "index_head_dim": 20,
    "index_topk": 24,
    "attention_bias": True,
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
_CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_bias": True,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 21,  # 42 channels of B, which 4 heads cannot share equally
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
    "attention_bias": True,
}
_SHARED_EXPERT = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 52,
}
_NO_PAD = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 40,
    "tie_word_embeddings": True,
    "attention_bias": True,
}

# name: model class, config class, config values in addition to the sizes
_FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-llama3-tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    ),
    "llama-linear-biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-small-heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 8}),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "mistral-wide-heads": (
        MistralForCausalLM,
        MistralConfig,
        {"head_dim": 32, "sliding_window": None},
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 40}),
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": _YARN}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen2-some-windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40},
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "mlp_only_layers": [1],
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        _DELTA | _SHARED_EXPERT | {"mlp_only_layers": [1]},
    ),
    "qwen3.5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        _DELTA | {"tie_word_embeddings": True},
    ),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, _DELTA | _SHARED_EXPERT),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": 40,
            "rope_parameters": _YARN | {"truncate": False},
            "swiglu_limit": 0.5,  # small enough to take effect
        },
    ),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek-v2-groups": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        _DEEPSEEK
        | {
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
        },
    ),
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        _DEEPSEEK
        | {
            "q_lora_rank": 28,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek-v3-halves": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        _DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            # limits the effect of an expert choice that bfloat16 changes
            "routed_scaling_factor": 0.25,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "kimi-linear": (
        KimiLinearForCausalLM,
        KimiLinearConfig,
        {key: value for key, value in _DEEPSEEK.items() if "routed" not in key}
        | {
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "linear_num_heads": 3,
            "linear_head_dim": 48,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            **_NO_PAD,
        },
    ),
    "deepseek-v3.2": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        _DEEPSEEK
        | _INDEXER
        | {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            **_NO_PAD,
        },
    ),
    "glm5": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        _DEEPSEEK
        | _INDEXER
        | {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "tie_word_embeddings": True,
            **_NO_PAD,
        },
    ),
    "deepseek-v4": (
        DeepseekV4ForCausalLM,
        DeepseekV4Config,
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 28,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
            "swiglu_limit": 0.5,
            "layer_types": [
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "sliding_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 32,
            },
            "sliding_window": 40,
            "o_groups": 2,
            "o_lora_rank": 20,
            "index_n_heads": 16,
            "index_head_dim": 20,
            "index_topk": 12,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "rope_parameters": {**_YARN},  # transformers changes it
            **_NO_PAD,
        },
    ),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True, **_NO_PAD},
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {"attention_bias": True}),
    "olmo-hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        # q, k and v have equally many channels, because transformers stores equal parts.
        _DELTA
        | {
            "linear_num_key_heads": 3,
            "linear_key_head_dim": 64,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            **_NO_PAD,
        },
    ),
    "olmo-hybrid-rope": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_allow_neg_eigval": False,
            "rope_parameters": _LINEAR,
            "tie_word_embeddings": True,
            **_NO_PAD,
        },
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        _GRANITE | {"mlp_bias": True},
    ),
    "granite4": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        _GRANITE
        | _MAMBA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "mamba_proj_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 44,
            "shared_intermediate_size": 52,
        },
    ),
    "granite4-dense": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "num_local_experts": 0,
            "shared_intermediate_size": 52,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": (
        FalconH1ForCausalLM,
        FalconH1Config,
        _MAMBA
        | {
            "mamba_d_ssm": 192,
            "mlp_multipliers": [1.7, 0.6],
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.2,
            "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.7],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.3,
            "embedding_multiplier": 5.7,
            "lm_head_multiplier": 0.4,
            "rope_parameters": _LINEAR,
        },
    ),
    "falcon-h1-norm": (
        FalconH1ForCausalLM,
        FalconH1Config,
        _MAMBA
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 192,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_out_multiplier": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": (
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"),
            ],
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 48,
            "ssm_state_size": 21,
            "n_groups": 2,
            "use_bias": True,
            "mlp_bias": True,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "moe_shared_expert_intermediate_size": 52,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config,
        _CONV | {"intermediate_size": 120, "block_multiple_of": 36},
    ),
    "lfm2-moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        _CONV
        | {
            "num_dense_layers": 2,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": (
        Lfm3ForCausalLM,
        Lfm3Config,
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention", "conv"],
            "conv_bias": True,
            "head_dim": 32,
            "sliding_window": 40,
            "attention_bias": True,
            **_NO_PAD,
        },
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 40, **_NO_PAD}),
    "phi3-longrope": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": _LONGROPE,
            "tie_word_embeddings": True,
            **_NO_PAD,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        _GEMMA
        | {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            # the other implementations do not support the logit cap
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _LINEAR | {"rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {
            "attention_bias": True,
            "sliding_window": 40,
            "layer_types": _WINDOWS,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            **_NO_PAD,
        },
    ),
    "glm": (GlmForCausalLM, GlmConfig, {"head_dim": 32, **_NO_PAD}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 32, "tie_word_embeddings": True, **_NO_PAD}),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        _EXPERTS
        | {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        _DEEPSEEK
        | {
            "q_lora_rank": 28,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **_NO_PAD,
        },
    ),
    "minimax-m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rotary_dim": 16,
            **_NO_PAD,
        },
    ),
    "minimax-m3": (
        MiniMaxM3VLForCausalLM,
        MiniMaxM3VLTextConfig,
        {
            "intermediate_size": 44,
            "dense_intermediate_size": 76,
            "shared_intermediate_size": 52,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 20,
            "index_block_size": 8,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            "head_dim": 32,
            "rotary_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
            | {"partial_rotary_factor": 0.5},
            **_NO_PAD,
        },
    ),
    "seed-oss": (
        SeedOssForCausalLM,
        SeedOssConfig,
        {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True, **_NO_PAD},
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {
            "sliding_window": 40,
            "layer_types": _WINDOWS,
            "rope_parameters": _LLAMA3,
            **_NO_PAD,
        },
    ),
    "ernie4.5": (
        Ernie4_5ForCausalLM,
        Ernie4_5Config,
        {"head_dim": 32, "use_bias": True, **_NO_PAD},
    ),
    "ernie4.5-moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 12,
            "moe_k": 7,
            "moe_intermediate_size": 44,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "moe_num_shared_experts": 2,
            **_NO_PAD,
        },
    ),
    "hy-v3": (
        HYV3ForCausalLM,
        HYV3Config,
        {
            "head_dim": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "num_shared_experts": 2,
            "attention_bias": True,
            "mlp_bias": False,
        },
    ),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config,
        {
            "attention_bias": True,
            "sliding_window": 40,
            "layer_types": _WINDOWS,
            "logit_scale": 0.3,
            "layer_norm_eps": 1e-3,
            **_NO_PAD,
        },
    ),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config,
        {
            "head_dim": 32,
            "rope_parameters": _YARN
            | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.4},
            **_NO_PAD,
        },
    ),
    "mistral4": (
        Mistral4ForCausalLM,
        Mistral4Config,
        _DEEPSEEK
        | {
            "q_lora_rank": 28,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
            **_NO_PAD,
        },
    ),
    "hunyuan": (
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config,
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0}
            | {"alpha": 50.0, "factor": 1.0},
            **_NO_PAD,
        },
    ),
    "hunyuan-moe": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config,
        {"head_dim": 32, "num_experts": 6, "moe_topk": [3, 3, 3], **_NO_PAD},
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 44,
            "intermediate_size_mlp": 60,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 40,
            "floor_scale": 32,
            "attn_scale": 0.4,
            "attention_bias": True,
            **_NO_PAD,
        },
    ),
    "gemma3n": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            "num_hidden_layers": 5,
            "intermediate_size": [76, 76, 60, 76, 44],
            "head_dim": 16,
            "sliding_window": 40,
            "attention_bias": True,
            "layer_types": ["sliding_attention", *_WINDOWS, "full_attention"],
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 190,
            "num_kv_shared_layers": 2,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 12,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.8],
            **_NO_PAD,
        },
    ),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 40,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 203,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "global_head_dim": 32,
            **_NO_PAD,
        },
    ),
    "gemma4-keys": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            **_NO_PAD,
        },
    ),
    "gemma4-moe": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 203,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 44,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "global_head_dim": 32,
            **_NO_PAD,
        },
    ),
    "mimo-v2": (
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        {
            "head_dim": 32,
            "v_head_dim": 16,
            "num_key_value_heads": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "routed_scaling_factor": 0.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0}
                | {"partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
                | {"partial_rotary_factor": 0.25},
            },
            "attn_implementation": "eager",
            **_NO_PAD,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)
# Checkpoints whose layers are all of kinds that other checkpoints have, too. Longer tests leave
# them to the long form.
KNOWN_KINDS = (
    *("olmo3", "glm", "glm4-moe", "glm4-moe-lite", "minimax-m2", "seed-oss", "exaone4"),
    "deepseek-v3.2",
    *("ernie4.5", "hy-v3", "mistral4", "hunyuan-moe", "gemma4-keys"),
    *("granite4-dense", "falcon-h1-norm", "lfm2-moe", "olmo-hybrid-rope"),
)


def families_of(architecture: str) -> list[str]:
    """Lists the names of the checkpoints of an architecture."""
    return [name for name, (kind, *_) in _FAMILIES.items() if kind.__name__ == architecture]


def make_tiny_model(family: str, path: Path, **more: Any) -> tuple[ModelFolder, PreTrainedModel]:
    """Writes a model folder as from the hub. Returns it and transformers' model, both in fp32.

    `more` are settings of its config.
    """
    model_class, config_class, beyond = _FAMILIES[family]
    return _written(model_class, config_class(**(_SIZES | beyond | more)), path)


def make_tiny_classifier(
    family: str, path: Path, **more: Any
) -> tuple[ModelFolder, PreTrainedModel]:
    """Writes a model folder of the family's `...ForSequenceClassification`, as `make_tiny_model`
    does."""
    _, config_class, beyond = _FAMILIES[family]
    config = config_class(**(_SIZES | beyond | {"pad_token_id": None} | more))
    return _written(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[config_class], config, path)


def _written(
    model_class: type[PreTrainedModel], config: Any, path: Path
) -> tuple[ModelFolder, PreTrainedModel]:
    torch.manual_seed(7)
    model = model_class(config).eval()
    with torch.no_grad():
        # includes biases and norms, because zeros and ones would hide errors
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.copy_(torch.randn_like(buffer) * 0.2 + name.endswith("layer_scalar"))
            if name.endswith("tid2eid"):
                experts = torch.rand(len(buffer), 12).topk(buffer.shape[1]).indices
                buffer.copy_(experts)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # exp(-8) per token: a state lasts thousands of tokens
                parameter.sub_(8.0)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    return read_folder(path), model


def character_tokenizer() -> Tokenizer:
    """Creates a tokenizer with one token for each printable ASCII character."""
    vocabulary = {chr(32 + i): i for i in range(95)} | {"?": 31}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def make_random_speaker(path: Path, **more: Any) -> ModelFolder:
    """Writes a tiny random model in fp32 with the built-in model's tokenizer and chat template.

    `more` are settings of its config.
    """
    torch.manual_seed(7)
    own = {"vocab_size": 49152, "head_dim": 16, "eos_token_id": 2}
    config = LlamaConfig(**(_SIZES | own | more))
    LlamaForCausalLM(config).save_pretrained(path)
    for file in resolve("smollm2").path.iterdir():
        if not (path / file.name).exists() and file.suffix != ".safetensors":
            (path / file.name).symlink_to(file)
    return read_folder(path)
