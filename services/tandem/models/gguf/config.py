"""Turns the metadata of a GGUF file into a config.json and a generation_config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.errors import UnsupportedModel
from tandem.models.gguf.deepseek import deepseek_config
from tandem.models.gguf.neutral import check_neutral
from tandem.models.gguf.rope import rope_scaling

if TYPE_CHECKING:
    import numpy as np

_MISSING = object()
_SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

# general.architecture -> the Hugging Face class that computes the same. Mistral's GGUF files say
# llama, and are the same computation.
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
}
_GEMMAS = ("gemma2", "gemma3")
# Of these numbers of layers, the largest Gemma 2 and 3, scores are scaled by the hidden size.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_WITH_EXPERTS = ("llama", "qwen3moe", "gpt-oss", "deepseek2")  # llama: Mixtral
# Texts of tokens that end an answer, beside those that a file names.
_ENDS = {
    "phi3": ("<|end|>", "<|im_end|>", "<|endoftext|>"),
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
}
# Sizes of heads that must all be the one of attention.key_length, but with latent attention.
_OF_HEADS = (
    *("attention.value_length", "rope.dimension_count"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
)
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


class GgufMetadata:
    """Typed look-ups in the key-value part of a GGUF file; arrays are read when asked for."""

    def __init__(self, reader: Any) -> None:
        """`reader` is a gguf.GGUFReader. Raises UnsupportedModel for other architectures, and for a
        part of a model."""
        self._fields = reader.fields
        if int(num_files := self.get("split.count", 1)) > 1:
            raise UnsupportedModel(
                f"it is one of {num_files} files of a model; join them with llama-gguf-split "
                "--merge"
            )
        self.architecture: str = self.get("general.architecture", "(none named)")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"GGUF architecture {self.architecture} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def special_ids(self, **keys: str) -> dict[str, int]:
        """Token ids by the names that `keys` give them, as far as the file has them."""
        found = {name: self.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        return {name: int(token_id) for name, token_id in found.items() if token_id is not None}

    def of_model(self, key: str, default: Any = _MISSING) -> Any:
        """Reads a key of the architecture. Raises UnsupportedModel if it is absent or per layer."""
        full_key = f"{self.architecture}.{key}"
        value = self.get(full_key, default)
        if value is _MISSING:
            raise UnsupportedModel(f"the GGUF file has no {full_key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(
                    f"{full_key} differs from layer to layer; only one value for all is supported"
                )
            return value[0]
        return value


def hf_config(
    metadata: GgufMetadata,
    *,
    tensor_names: frozenset[str],
    rope_tables: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Returns a config.json's contents. `rope_tables` are the tensors of names.ROPE_TABLES.

    Raises UnsupportedModel naming what a Hugging Face folder could not say or we could not run.
    """
    architecture, model_type = ARCHITECTURES[metadata.architecture]
    num_heads = int(metadata.of_model("attention.head_count"))
    hidden_size = int(metadata.of_model("embedding_length"))
    head_dim = int(metadata.of_model("attention.key_length", hidden_size // num_heads))
    context_length = int(metadata.of_model("context_length"))
    theta = float(metadata.of_model("rope.freq_base", 10000.0))
    _check_supported(metadata, head_dim=head_dim)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", [])),
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.of_model("feed_forward_length")),
        "num_hidden_layers": int(metadata.of_model("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.of_model("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": float(metadata.of_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, theta=theta, tables=rope_tables),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": metadata.architecture != "qwen2" and "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "torch_dtype": "float32",
    }
    if metadata.architecture == "deepseek2":
        more = deepseek_config(metadata)
    else:
        more = _experts(metadata) | _granite(metadata)
    more |= _window(metadata)
    if metadata.architecture == "phi3":
        more |= _phi3(metadata, head_dim=head_dim)
    if metadata.architecture == "gpt-oss" and config["rope_scaling"] is None:
        config["rope_scaling"] = {"rope_type": "default"}  # YaRN where nothing is said
    if metadata.architecture in _GEMMAS:
        more = _gemma(metadata, head_dim=head_dim, wide=hidden_size // num_heads)
    return config | more | metadata.special_ids(**_SPECIAL)


def generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns every id that ends a sequence: end of text, of turn and of message, if named."""
    named = [*metadata.special_ids(eos="eos", eot="eot", eom="eom").values(), *_ends(metadata)]
    eos = list(dict.fromkeys(named))
    ids: dict[str, Any] = metadata.special_ids(**_SPECIAL)
    if eos:
        ids["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    return ids


def _ends(metadata: GgufMetadata) -> list[int]:
    texts = _ENDS.get(metadata.architecture, ())
    tokens = metadata.get("tokenizer.ggml.tokens", []) if texts else []
    return [token_id for token_id, token in enumerate(tokens) if token in texts]


def _check_supported(metadata: GgufMetadata, *, head_dim: int) -> None:
    check_neutral(metadata)
    num_experts = int(metadata.of_model("expert_count", 0))
    if num_experts and metadata.architecture not in _WITH_EXPERTS:
        raise UnsupportedModel(
            f"a mixture of {num_experts} experts is not supported for {metadata.architecture}; "
            f"it is for {' and '.join(_WITH_EXPERTS)}"
        )
    for key in _OF_HEADS if metadata.architecture != "deepseek2" else ():
        size = int(metadata.of_model(key, head_dim))
        is_partial = metadata.architecture == "phi3" and key == "rope.dimension_count"
        if size != head_dim and not is_partial:
            raise UnsupportedModel(
                f"{key} {size} is not supported; it must equal the head size {head_dim}"
            )


def _experts(metadata: GgufMetadata) -> dict[str, Any]:
    num_experts = int(metadata.of_model("expert_count", 0))
    if not num_experts:
        return {}
    experts = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": int(metadata.of_model("expert_used_count")),
    }
    if metadata.architecture == "llama":
        return experts | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if metadata.architecture == "gpt-oss":
        stated = metadata.of_model("feed_forward_length")
        inner = metadata.of_model("expert_feed_forward_length", stated)
        return experts | {"intermediate_size": int(inner)}
    inner = int(metadata.of_model("expert_feed_forward_length"))
    return experts | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _phi3(metadata: GgufMetadata, *, head_dim: int) -> dict[str, Any]:
    rotated = int(metadata.of_model("rope.dimension_count", head_dim))
    window = int(metadata.of_model("attention.sliding_window", 0) or 0)
    config: dict[str, Any] = {
        "partial_rotary_factor": rotated / head_dim,
        "sliding_window": window or None,
    }
    original = metadata.of_model("rope.scaling.original_context_length", None)
    if original is not None:
        config["original_max_position_embeddings"] = int(original)
    return config


def _granite(metadata: GgufMetadata) -> dict[str, Any]:
    if metadata.architecture != "granite":
        return {}
    given = {name: metadata.of_model(key, None) for name, key in _GRANITE.items()}
    return {name: float(value) for name, value in given.items() if value is not None}


def _gemma(metadata: GgufMetadata, *, head_dim: int, wide: int) -> dict[str, Any]:
    is_27b = int(metadata.of_model("block_count")) == _GEMMA_27B[metadata.architecture]
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": wide if is_27b else head_dim,
        "sliding_window": int(metadata.of_model("attention.sliding_window", 4096)),
    }
    pattern = metadata.get(f"{metadata.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]
    elif pattern is not None:
        config["sliding_window_pattern"] = int(pattern)
    if metadata.architecture == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := metadata.of_model(name, None)) is not None:
                config[name] = float(cap)
        return config
    local_theta = float(metadata.of_model("rope.freq_base_swa", 10000.0))
    return config | {"rope_local_base_freq": local_theta}


def _window(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns what a config.json says of a sliding window that all layers have.

    Raises UnsupportedModel if only some have it.
    """
    window = int(metadata.of_model("attention.sliding_window", 0) or 0)
    if not window or metadata.architecture in (*_GEMMAS, "phi3"):
        return {}
    if metadata.architecture == "gpt-oss":  # every second layer has it, the first one too
        return {"sliding_window": window}
    if int(metadata.of_model("attention.sliding_window_pattern", 1)) != 1:
        raise UnsupportedModel(
            "attention.sliding_window_pattern gives a sliding window to some layers and full "
            "attention to the others; supported is one kind for all layers"
        )
    if metadata.architecture not in ("llama", "qwen2", "qwen3", "qwen3moe"):
        raise UnsupportedModel(f"a sliding window is not supported for {metadata.architecture}")
    if int(metadata.of_model("expert_count", 0)):
        return {"sliding_window": window, "use_sliding_window": True}
    if metadata.architecture == "llama":  # the same computation but for the window
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
