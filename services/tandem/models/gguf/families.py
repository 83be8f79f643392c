"""Reads the GGUF keys in which architectures differ from Llama, beyond sizes that all have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tandem.errors import UnsupportedModel

if TYPE_CHECKING:
    from tandem.models.gguf.metadata import GgufMetadata

# Architectures whose heads may have positions in a part of their elements only.
WITH_PARTIAL_ROPE = (
    *("phi3", "glm4", "glm4moe", "minimax-m2"),
    *("qwen3next", "qwen35", "qwen35moe"),
)
# Architectures with experts, besides those that config.py reads.
WITH_EXPERTS = ("qwen3next", "qwen35moe", "glm4moe", "minimax-m2", "ernie4_5-moe", "hunyuan-moe")
# Architectures some of whose layers have a window.
WITH_WINDOWS = ("olmo2", "exaone4", "cohere2")
_SIGMOID = 2  # value of expert_gating_func


def family_config(
    metadata: GgufMetadata, *, head_dim: int, tensor_names: frozenset[str]
) -> dict[str, Any]:
    """Returns the keys of config.json that are specific to the file's architecture.

    Raises UnsupportedModel naming a key that is not supported."""
    config: dict[str, Any] = {}
    if metadata.architecture in WITH_PARTIAL_ROPE:
        rotated = metadata.size("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    read = _READERS.get(metadata.architecture)
    return config | read(metadata, tensor_names) if read else config


def _linear(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    num_heads = metadata.size("ssm.time_step_rank")
    inner = metadata.size("ssm.inner_size")
    if inner % num_heads:
        raise UnsupportedModel(
            f"{metadata.architecture}.ssm.inner_size is {inner}; it must be a multiple of "
            f"ssm.time_step_rank, {num_heads}"
        )
    return {
        "full_attention_interval": metadata.size("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": inner // num_heads,
        "linear_num_key_heads": metadata.size("ssm.group_count"),
        "linear_num_value_heads": num_heads,
    }


def _linear_with_experts(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    return _linear(metadata, tensor_names) | {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _glm_moe(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    _demand(metadata, "expert_gating_func", (_SIGMOID,))
    num_groups = metadata.count("expert_group_count", 0) or 1
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensor_names,
        "n_routed_experts": metadata.size("expert_count"),
        "n_shared_experts": metadata.size("expert_shared_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.flag_of_model("expert_weights_norm", False),
        "n_group": num_groups,
        "topk_group": metadata.count("expert_group_used_count", 0) or num_groups,
        "num_nextn_predict_layers": 0,  # the count of layers excludes them
    }


def _minimax(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    _demand(metadata, "expert_gating_func", (_SIGMOID,))
    return {
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "rotary_dim": metadata.size("rope.dimension_count"),
    }


def _seed_oss(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensor_names}


def _ernie(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensor_names}


def _ernie_moe(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    return _ernie(metadata, tensor_names) | {
        "moe_num_experts": metadata.size("expert_count"),
        "moe_k": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.size("expert_shared_count"),
        "moe_layer_start_index": metadata.count("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
    }


def _hunyuan_moe(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    inner = metadata.size("expert_feed_forward_length")
    _demand(metadata, "expert_shared_count", (1,))
    _demand(metadata, "expert_shared_feed_forward_length", (inner,))
    return {
        "num_experts": metadata.size("expert_count"),
        "moe_topk": metadata.size("expert_used_count"),
        "intermediate_size": inner,
    }


def _cohere(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    return _windows(metadata, tensor_names) | {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "logit_scale": metadata.number("logit_scale"),
    }


def _olmo(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with windows."""
    windows = _windows(metadata, tensor_names)
    if windows["sliding_window"] is None:
        return {}
    return windows | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}


def _windows(metadata: GgufMetadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    """Returns the window and which layers have it. Without a pattern in the file, transformers'
    default for the architecture applies."""
    window = metadata.count("attention.sliding_window", 0)
    config: dict[str, Any] = {"sliding_window": window or None}
    pattern = metadata.get(f"{metadata.architecture}.attention.sliding_window_pattern")
    if window and isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    elif window and pattern is not None:
        config["sliding_window_pattern"] = metadata.size("attention.sliding_window_pattern")
    return config


def _demand(metadata: GgufMetadata, key: str, allowed: tuple[int, ...]) -> None:
    value = metadata.count(key, allowed[0])
    if value not in allowed:
        raise UnsupportedModel(
            f"{metadata.architecture}.{key} is {value!r:.80}, which is not supported; supported is "
            f"{' or '.join(map(str, allowed))}"
        )


_READERS: Mapping[str, Callable[[GgufMetadata, frozenset[str]], dict[str, Any]]] = {
    "qwen3next": _linear_with_experts,
    "qwen35": _linear,
    "qwen35moe": _linear_with_experts,
    "glm4moe": _glm_moe,
    "minimax-m2": _minimax,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "exaone4": _windows,
    "cohere2": _cohere,
    "olmo2": _olmo,
}
