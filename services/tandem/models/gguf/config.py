"""Converts the metadata of a GGUF file to config.json and generation_config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.errors import UnsupportedModel
from tandem.models.gguf.deepseek import deepseek_config
from tandem.models.gguf.end_tokens import end_token_ids
from tandem.models.gguf.families import (
    WITH_EXPERTS,
    WITH_PARTIAL_ROPE,
    WITH_WINDOWS,
    family_config,
)
from tandem.models.gguf.metadata import GgufMetadata
from tandem.models.gguf.neutral import check_neutral
from tandem.models.gguf.rope import rope_scaling

if TYPE_CHECKING:
    import numpy as np

_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

# general.architecture -> (Hugging Face class, model_type). GGUF files of Mistral models have the
# architecture llama, because a Mistral model is computed as a Llama model is.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "granite": ("GraniteForCausalLM", "granite"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
}
_GEMMAS = ("gemma2", "gemma3")
# Numbers of layers by which files of Gemma 2 27B and Gemma 3 27B are recognized. Only in these two
# Gemma models, the scale of attention scores is computed from hidden size / number of heads. Others
# compute it from the head size.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# Values of general.architecture whose models may have experts. With experts, llama means Mixtral.
_WITH_EXPERTS = ("llama", "qwen3moe", "gpt-oss", "deepseek2", *WITH_EXPERTS)
# Keys whose value must equal attention.key_length, because config.json has one head size. Latent
# attention is an exception.
_HEAD_SIZE_KEYS = (
    *("attention.value_length", "rope.dimension_count"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
)
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def hf_config(
    metadata: GgufMetadata,
    *,
    tensor_names: frozenset[str],
    rope_tables: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns the contents of config.json. `rope_tables` maps the names in names.ROPE_TABLES to the
    RoPE tables of the file.

    Raises UnsupportedModel naming a key that config.json cannot express or that is not supported.
    """
    if metadata.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {metadata.architecture} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture, model_type = ARCHITECTURES[metadata.architecture]
    num_heads = metadata.size("attention.head_count")
    hidden_size = metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", hidden_size // num_heads)
    if head_dim < 1:
        raise UnsupportedModel(
            f"{metadata.architecture}.embedding_length is {hidden_size}; it must be at least the "
            f"number of heads, {num_heads}"
        )
    context_length = metadata.size("context_length")
    theta = metadata.number("rope.freq_base", 10000.0)
    _check_supported(metadata, head_dim=head_dim)
    # A file in which all layers have experts may lack the size of dense MLPs, which nothing uses.
    expert_inner = metadata.size("expert_feed_forward_length", None)
    inner_default = {} if expert_inner is None else {"default": expert_inner}
    # A file counts layers that predict further tokens, which are not computed.
    num_layers = metadata.size("block_count") - metadata.count("nextn_predict_layers", 0)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(metadata.tokens()),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size("feed_forward_length", **inner_default),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        **_norm_eps(metadata),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, theta=theta, tables=rope_tables),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": metadata.architecture != "qwen2" and "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "torch_dtype": "float32",
    }
    if metadata.architecture == "deepseek2":
        more = deepseek_config(metadata)
    elif metadata.architecture in WITH_EXPERTS:
        more = {}
    else:
        more = _experts(metadata) | _granite(metadata)
    more |= _window(metadata)
    more |= family_config(metadata, head_dim=head_dim, tensor_names=tensor_names)
    if metadata.architecture == "phi3":
        more |= _phi3(metadata)
    if metadata.architecture == "gpt-oss" and config["rope_scaling"] is None:
        # Without this entry, transformers would use YaRN, its default for gpt-oss.
        config["rope_scaling"] = {"rope_type": "default"}
    if metadata.architecture in _GEMMAS:
        more = _gemma(metadata, head_dim=head_dim, wide=hidden_size // num_heads)
    if more.get("model_type") == "olmo3":
        more |= _ropes_by_kind(metadata, config, theta=theta)
    return config | more | metadata.special_ids(**_SPECIAL)


# Key under general.sampling -> key in generation_config.json.
_SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}


def generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the contents of generation_config.json: the ids of all end tokens, and the sampling
    defaults that newer files have."""
    ids: dict[str, Any] = metadata.special_ids(**_SPECIAL)
    if eos := end_token_ids(metadata):
        ids["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    for name, ours in _SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{name}")) is not None:
            # Values are rounded because the file stores float32, in which 0.7 is 0.699999988.
            ids[ours] = round(value, 6) if isinstance(value, float) else value
    return ids


def _check_supported(metadata: GgufMetadata, *, head_dim: int) -> None:
    check_neutral(metadata)
    num_experts = metadata.count("expert_count", 0)
    if num_experts and metadata.architecture not in _WITH_EXPERTS:
        raise UnsupportedModel(
            f"a mixture of {num_experts} experts is not supported for {metadata.architecture}; "
            f"supported architectures with experts are {' and '.join(_WITH_EXPERTS)}"
        )
    for key in _HEAD_SIZE_KEYS if metadata.architecture != "deepseek2" else ():
        size = metadata.size(key, head_dim)
        is_partial = metadata.architecture in WITH_PARTIAL_ROPE and key == "rope.dimension_count"
        if size != head_dim and not is_partial:
            raise UnsupportedModel(
                f"{key} {size} is not supported; it must equal the head size {head_dim}"
            )


def _ropes_by_kind(
    metadata: GgufMetadata, config: dict[str, Any], *, theta: float
) -> dict[str, Any]:
    """Returns the RoPE parameters of OLMo 3, in which layers with a window have no scaling."""
    full = {"rope_theta": theta} | (config["rope_scaling"] or {"rope_type": "default"})
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", theta)}
    return {
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _norm_eps(metadata: GgufMetadata) -> dict[str, float]:
    if metadata.architecture == "cohere2":  # whose norms are LayerNorms
        return {}
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    num_experts = metadata.count("expert_count", 0)
    if not num_experts:
        return {}
    experts = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }
    if metadata.architecture == "llama":
        return experts | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if metadata.architecture == "gpt-oss":
        stated = metadata.size("feed_forward_length")
        inner = metadata.size("expert_feed_forward_length", stated)
        return experts | {"intermediate_size": inner}
    inner = metadata.size("expert_feed_forward_length")
    return experts | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _phi3(metadata: GgufMetadata) -> dict[str, Any]:
    window = metadata.count("attention.sliding_window", 0)
    config: dict[str, Any] = {"sliding_window": window or None}
    original = metadata.size("rope.scaling.original_context_length", None)
    if original is not None:
        config["original_max_position_embeddings"] = original
    return config


def _granite(metadata: GgufMetadata) -> dict[str, Any]:
    if metadata.architecture != "granite":
        return {}
    given = {name: metadata.number(key, None) for name, key in _GRANITE.items()}
    return {name: value for name, value in given.items() if value is not None}


def _gemma(metadata: GgufMetadata, *, head_dim: int, wide: int) -> dict[str, Any]:
    is_27b = metadata.size("block_count") == _GEMMA_27B[metadata.architecture]
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": wide if is_27b else head_dim,
        "sliding_window": metadata.size("attention.sliding_window", 4096),
    }
    pattern = metadata.get(f"{metadata.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    elif pattern is not None:
        config["sliding_window_pattern"] = metadata.size("attention.sliding_window_pattern")
    if metadata.architecture == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := metadata.number(name, None)) is not None:
                config[name] = cap
        return config
    local_theta = metadata.number("rope.freq_base_swa", 10000.0)
    return config | {"rope_local_base_freq": local_theta}


def _window(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the keys of config.json for a sliding window.

    Raises UnsupportedModel if only some layers have the window, except for gpt-oss.
    """
    window = metadata.count("attention.sliding_window", 0)
    if not window or metadata.architecture in (*_GEMMAS, "phi3", *WITH_WINDOWS):
        return {}
    # In gpt-oss models, the layers 0, 2, 4 and so on have a window.
    if metadata.architecture == "gpt-oss":
        return {"sliding_window": window}
    if metadata.of_model("attention.sliding_window_pattern", 1) != 1:
        raise UnsupportedModel(
            "attention.sliding_window_pattern gives a sliding window to some layers and full "
            "attention to the others; all layers must have the same kind of attention"
        )
    if metadata.architecture not in ("llama", "qwen2", "qwen3", "qwen3moe"):
        raise UnsupportedModel(f"a sliding window is not supported for {metadata.architecture}")
    if metadata.count("expert_count", 0):
        return {"sliding_window": window, "use_sliding_window": True}
    if metadata.architecture == "llama":  # A llama file with a sliding window is Mistral.
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
