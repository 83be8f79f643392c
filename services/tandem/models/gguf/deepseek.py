"""Reads the GGUF keys of the architecture `deepseek2`: DeepSeek V2, V3 and compatible models.

V2 and V3 share one architecture in GGUF files. The gating function of the experts distinguishes
them: softmax is V2, sigmoid is V3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.errors import UnsupportedModel

if TYPE_CHECKING:
    from tandem.models.gguf.metadata import GgufMetadata

# Values of expert_gating_func: 0 stands for an absent key (older files), which means softmax.
_SOFTMAX = (0, 1)
_SIGMOID = 2
# (number of layers, number of experts) -> (number of expert groups, number of groups chosen for
# each token). The entries are DeepSeek V2 and V3. They are needed because older GGUF files of these
# models do not store the numbers of groups.
_GROUPS = {(60, 160): (8, 3), (61, 256): (8, 4)}


def deepseek_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns the keys of config.json that are specific to DeepSeek.

    Raises UnsupportedModel naming the key that is not supported.
    """
    return _latent(metadata) | _experts(metadata)


def latent_rope(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns `mscale` and `mscale_all_dim` for `rope_scaling`; {} if the file has neither.

    GGUF files store mscale_all_dim / 10 and do not store mscale. In all published models, mscale
    equals mscale_all_dim. Raises UnsupportedModel for a negative value.
    """
    key = "rope.scaling.yarn_log_multiplier"
    mscale = round(10 * metadata.number(key, 0.0), 6)
    if mscale < 0:
        raise UnsupportedModel(
            f"{metadata.architecture}.{key} is {mscale / 10}; it must be at least 0"
        )
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}


def _latent(metadata: GgufMetadata) -> dict[str, Any]:
    num_heads = metadata.size("attention.head_count")
    num_kv_heads = metadata.size("attention.head_count_kv", num_heads)
    if num_kv_heads not in (1, num_heads):
        raise UnsupportedModel(
            f"{metadata.architecture}.attention.head_count_kv is {num_kv_heads}; with latent "
            f"attention it must be 1 or head_count, {num_heads}"
        )
    kv_rank = metadata.size("attention.kv_lora_rank")
    rope = metadata.size("rope.dimension_count")
    query, value = _head_sizes(metadata, kv_rank=kv_rank, rope=rope)
    if query <= rope:
        raise UnsupportedModel(
            f"{metadata.architecture}.rope.dimension_count is {rope}; it must be less than "
            f"{query}, the size of a head's key"
        )
    return {
        "num_key_value_heads": num_heads,
        "kv_lora_rank": kv_rank,
        "q_lora_rank": metadata.count("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": query - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "head_dim": rope,  # In transformers, head_dim of these models is the size of the RoPE part.
        "rope_interleave": True,
    }


def _head_sizes(metadata: GgufMetadata, *, kv_rank: int, rope: int) -> tuple[int, int]:
    """Returns the size of a head's key, including the rotated part, and the size of its value.

    Newer files store the two sizes in `key_length_mla` and `value_length_mla`. In these files,
    `key_length` and `value_length` are the sizes of a token's KV.
    """
    parts = ("key", "value")
    usual = [metadata.size(f"attention.{part}_length", None) for part in parts]
    own = [metadata.size(f"attention.{part}_length_mla", None) for part in parts]
    attention = f"{metadata.architecture}.attention"
    if None in own and own != [None, None]:
        raise UnsupportedModel(
            f"{attention} has only one of key_length_mla and value_length_mla; the file must "
            "have both or neither"
        )
    if own == [None, None]:
        if None in usual:
            raise UnsupportedModel(f"the GGUF file lacks {attention}.key_length or value_length")
        return usual[0], usual[1]
    of_token = [kv_rank + rope, kv_rank]
    if usual not in (of_token, [None, None]):
        raise UnsupportedModel(
            f"{attention}.key_length and value_length are {usual!r:.80}, but the file has "
            f"key_length_mla, so they must be {of_token}: kv_lora_rank + rope.dimension_count "
            "and kv_lora_rank"
        )
    return own[0], own[1]


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    num_experts = metadata.size("expert_count")
    gating = metadata.count("expert_gating_func", 0)
    if gating not in (*_SOFTMAX, _SIGMOID):
        raise _refusal(metadata, "expert_gating_func", gating, "0, 1 (softmax) and 2 (sigmoid)")
    if (num_shared := metadata.count("expert_shared_count")) < 1:
        raise _refusal(metadata, "expert_shared_count", num_shared, "integers of at least 1")
    is_normalized = metadata.flag_of_model("expert_weights_norm", False)
    groups = _groups(metadata, num_experts)
    config = {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "n_shared_experts": num_shared,
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": groups[0],
        "topk_group": groups[1],
    }
    if gating == _SIGMOID:
        return config | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "norm_topk_prob": is_normalized,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
    if is_normalized:  # Refused: transformers ignores this key, and other implementations do not.
        raise _refusal(
            metadata, "expert_weights_norm", is_normalized, "False if expert_gating_func is softmax"
        )
    has_groups = groups[0] > 1
    return config | {
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if has_groups else "greedy",
    }


def _groups(metadata: GgufMetadata, num_experts: int) -> tuple[int, int]:
    """Returns the number of expert groups, and how many of them are chosen for each token."""
    given = metadata.count("expert_group_count", 0)
    if given:
        return given, metadata.size("expert_group_used_count", given)
    return _GROUPS.get((metadata.size("block_count"), num_experts), (1, 1))


def _refusal(metadata: GgufMetadata, key: str, value: object, supported: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{metadata.architecture}.{key} is {value!r:.80}, which is not supported; supported are "
        f"{supported}"
    )
