"""The shape of a model, read from the config.json of its Hugging Face folder.

Knows shapes, not weights, and loads no torch. Everything that the engine could not run exactly is
refused here with UnsupportedModel, so that it is found before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import UnsupportedModel
from tandem.models.rope import RopeScaling, read_rope

_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_DTYPES = ("float32", "bfloat16", "float16")
_SLIDING_ATTENTION = "sliding_attention"
# What transformers assumes when the keys are absent.
_DEFAULT_WINDOW = 4096  # tokens
_DEFAULT_WINDOW_LAYERS = 28  # Qwen's layers without a window


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: pre-norm RMSNorm, grouped-query attention, gated SiLU MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotation (Qwen 3)
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    torch_dtype: str  # of the checkpoint; the engine chooses its own
    # Tokens that a token sees in every layer, itself and those just before it; None: all before it.
    sliding_window: int | None = None

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the contents of config.json and generation_config.json.

        Raises UnsupportedModel naming what cannot be run and what can.
        """
        architecture = _architecture(config)
        _check_supported(config)
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"{num_heads} attention heads do not divide into {num_kv_heads} KV heads"
            )
        attention_bias = bool(config.get("attention_bias", False))
        qwen3 = architecture == "Qwen3ForCausalLM"
        max_positions = _size(config, "max_position_embeddings")
        theta, scaling = read_rope(config)
        max_model_len = scaling.max_model_len(max_positions) if scaling else max_positions
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or (128 if qwen3 else hidden_size // num_heads)),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            attention_out_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            max_model_len=max_model_len,
            eos_token_ids=read_eos_token_ids(config, generation_config),
            torch_dtype=_dtype(config),
            sliding_window=_sliding_window(config, architecture, max_model_len),
        )


def read_eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """Returns the ids that end a sequence: generation_config.json's, else config.json's.

    Raises UnsupportedModel for ids that are no integers.
    """
    for source in (generation_config or {}, config):
        eos = source.get("eos_token_id")
        if eos is not None:
            ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
            if any(type(token_id) is not int for token_id in ids):
                raise UnsupportedModel(
                    f"eos_token_id of config.json or generation_config.json is {eos!r:.80}; it "
                    "must be a token id or a list of them"
                )
            return ids
    return ()


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ["(none named)"]
    if named[0] not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {named[0]} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    return str(named[0])


def _check_supported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method")
        raise UnsupportedModel(
            f"checkpoints quantized with {method} are not supported; supported are float32, "
            "bfloat16 and float16 weights, and GGUF files of any quantization"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not supported; silu is")


def _sliding_window(config: Mapping[str, Any], architecture: str, max_model_len: int) -> int | None:
    """Returns the window in tokens if all layers have one that is shorter than the context.

    Raises UnsupportedModel if only some layers have it.
    """
    if not _has_window(config, architecture):
        return None
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    if window is None:
        return None
    if type(window) is not int or window < 1:
        raise UnsupportedModel(
            f"sliding_window is {window!r:.80}; it must be a positive number of tokens or null"
        )
    return window if window < max_model_len else None


def _has_window(config: Mapping[str, Any], architecture: str) -> bool:
    """Returns whether all layers have the window. Raises UnsupportedModel if only some have it."""
    if architecture == "MistralForCausalLM":
        return True
    if architecture == "LlamaForCausalLM" or not config.get("use_sliding_window"):
        return False
    num_layers = _size(config, "num_hidden_layers")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        num_full = sum(kind != _SLIDING_ATTENTION for kind in layer_types)
        given = "layer_types"
    else:
        num_full = min(int(config.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)), num_layers)
        given = "max_window_layers"
    if 0 < num_full < num_layers:
        raise UnsupportedModel(
            f"{given} gives a sliding window to {num_layers - num_full} of {num_layers} layers and "
            "full attention to the others; supported is one kind for all layers"
        )
    return bool(num_full == 0)


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"weights of dtype {dtype} are not supported; supported are {', '.join(_DTYPES)}"
        )
    return dtype


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(
            f"config.json must give {name} as a positive integer, not {value!r:.80}"
        )
    return value
