"""Reads the sizes of a decoder that the transformers library computes.

The library's own config class reads config.json, so that its names and defaults apply. Python code
of the model's folder is never run. What cannot be computed on paged KV is refused here, before any
weight is read. The engine refuses more when it has the model's class
(engine/executor/transformers).

As a program, the module reads config.json from standard input and prints the result as JSON, so
that routers do not import transformers and torch (implementation.py).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.errors import UnsupportedModel
from tandem.models.config.layers import LAYERS_MAX

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Field that is set -> why a model with it cannot be computed.
_REFUSED_FIELDS = {
    "is_encoder_decoder": "it is an encoder-decoder, and only decoders are supported",
    "quantization_config": "quantized checkpoints are not supported through transformers",
    "alibi": "ALiBi adds to the attention scores, which paged attention does not support",
    "kv_lora_rank": "its KV is latent, which is not supported through transformers",
    "num_kv_shared_layers": "its layers share KV, which is not supported through transformers",
    "num_nextn_predict_layers": "multi-token prediction (MTP) layers are not supported",
    "use_bidirectional_attention": "a token can only attend to earlier tokens",
}
# Model types that have ALiBi without a field that says so.
_ALIBI_TYPES = ("bloom", "mpt")
# These scale the frequencies of all tokens by the current length, so that cached keys would have to
# change.
_REFUSED_ROPES = ("dynamic", "longrope")


class DecoderSizes(TypedDict):
    """The sizes of a decoder. `windows` has, for each layer, the largest number of tokens to which
    a token attends; None if it attends to all earlier tokens. `are_chunked` has, for each layer,
    whether this is the size of a chunk (`LayerSpec`)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    windows: list[int | None]
    are_chunked: list[bool]
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    max_model_len: int


def read_sizes(config: Mapping[str, Any]) -> DecoderSizes:
    """Reads the parsed contents of config.json. Raises UnsupportedModel naming the field, the rope
    type or the layer type that is not supported."""
    architecture = _architecture(config)
    read = read_hf_config(config)
    _check_supported(read, architecture)
    num_heads = _size(read, "num_attention_heads")
    hidden_size = _size(read, "hidden_size")
    max_model_len = _size(read, "max_position_embeddings")
    kinds = _layer_types(read)
    windows = _windows(read, kinds, max_model_len)
    return DecoderSizes(
        architecture=architecture,
        vocab_size=_size(read, "vocab_size"),
        hidden_size=hidden_size,
        windows=windows,
        are_chunked=[
            kind == _CHUNKED and window is not None
            for kind, window in zip(kinds, windows, strict=True)
        ],
        num_attention_heads=num_heads,
        num_kv_heads=getattr(read, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(read, "head_dim", None) or hidden_size // num_heads,
        tie_word_embeddings=bool(read.tie_word_embeddings),
        max_model_len=max_model_len,
    )


def read_hf_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the library's own form of config.json. Raises UnsupportedModel if the library cannot
    read it."""
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:  # The config classes share no base class of errors.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(f"transformers cannot read the config: {reason:.200}") from error


def _architecture(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if code := config.get("auto_map"):
            raise UnsupportedModel(
                f"auto_map is {code!r:.200}: transformers does not know the model_type "
                f"{kind!r:.80}, so the model needs Python code from its folder. Such code is "
                "never run"
            )
        raise UnsupportedModel(f"transformers does not know the model_type {kind!r:.80}")
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = config.get("architectures") or [decoder]
    if decoder is None or named != [decoder]:
        raise UnsupportedModel(
            f"architectures is {named!r:.80}; for the model_type {kind!r} it must be [{decoder!r}]"
            if decoder
            else f"transformers has no decoder for the model_type {kind!r}"
        )
    return str(decoder)


def _check_supported(config: PreTrainedConfig, architecture: str) -> None:
    if config.model_type in _ALIBI_TYPES:
        raise UnsupportedModel(f"{architecture} is not supported: {_REFUSED_FIELDS['alibi']}")
    for field, why in _REFUSED_FIELDS.items():
        if getattr(config, field, None):
            raise UnsupportedModel(f"{architecture} with {field} is not supported: {why}")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(
            "is_causal is false; it must be true, because only models whose tokens attend to "
            "earlier tokens alone are supported"
        )
    for kind in _rope_types(config):
        if kind in _REFUSED_ROPES:
            raise UnsupportedModel(
                f"rope type {kind!r} is not supported through transformers, because keys in the "
                "KV cache would change with the length of a sequence"
            )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes, *(each for each in ropes.values() if isinstance(each, dict))]
    return [str(each.get("rope_type") or each.get("type")) for each in kinds]


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """Returns the type of attention of each layer. Raises UnsupportedModel for other types than
    full, sliding and chunked attention."""
    num_layers = _size(config, "num_hidden_layers")
    if num_layers > LAYERS_MAX:
        raise UnsupportedModel(
            f"num_hidden_layers is {num_layers}; it must be at most {LAYERS_MAX}"
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [_SLIDING if window else _FULL] * num_layers
    for kind in kinds:
        if kind not in (_FULL, _SLIDING, _CHUNKED):
            raise UnsupportedModel(
                f"layer_types has {kind!r:.80}, which is not supported through transformers; "
                f"supported are {_FULL}, {_SLIDING} and {_CHUNKED}"
            )
    return list(kinds)


def _windows(
    config: PreTrainedConfig, kinds: Sequence[str], max_model_len: int
) -> list[int | None]:
    fields = {_SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}
    sizes = {kind: _size(config, fields[kind]) for kind in kinds if kind in fields}
    return [
        None if (size := sizes.get(kind)) is None or size >= max_model_len else size
        for kind in kinds
    ]


def _size(config: PreTrainedConfig, field: str) -> int:
    size = getattr(config, field, None)
    if type(size) is not int or size < 1:
        raise UnsupportedModel(f"{field} is {size!r:.80}; it must be a positive integer")
    return size


def main() -> None:
    try:
        print(json.dumps(read_sizes(json.load(sys.stdin))))
    except UnsupportedModel as error:
        print(error.message)
        sys.exit(1)


if __name__ == "__main__":
    main()
