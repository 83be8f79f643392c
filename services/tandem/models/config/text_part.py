"""Reads the language model of a multimodal checkpoint, its "text part", as a model of its own.

config.json has the config of the text part in `text_config`:

    {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {...}}

The prefix of tensor names depends on the program that wrote the checkpoint, or on the model:

    name                                                written by, or used for
    language_model.model.layers.0.mlp.up_proj.weight    transformers 4
    model.language_model.layers.0.mlp.up_proj.weight    transformers 5
    model.text_model.layers.0.mlp.up_proj.weight        Idefics and SmolVLM
    model.layers.0.mlp.up_proj.weight                   Qwen 2 VL

An architecture is supported if, for a prompt without images, the complete model and the text part
alone give exactly the same results. Cohere 2's are not supported, because transformers does not
multiply the logits of the complete models by `logit_scale`. PaliGemma is not supported, because its
prompt tokens attend to later tokens. BLIP is not supported, because it needs an image. Images,
audio and the tensors for them are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.errors import UnsupportedModel

_SUFFIX = "ForConditionalGeneration"
# Name of the multimodal architecture, without `_SUFFIX` -> model_type of the text part, which is
# used if `text_config` has no model_type.
_DEFAULT_KINDS: Mapping[str, str] = {
    "AudioFlamingo3": "qwen2",
    "DeepseekVL": "llama",
    "DeepseekVLHybrid": "llama",
    "FastVlm": "qwen2",
    "Gemma3": "gemma3_text",
    "Glm46V": "glm4v_text",
    "Glm4v": "glm4v_text",
    "Glm4vMoe": "glm4v_moe_text",
    "Gemma3n": "gemma3n_text",
    "Gemma4": "gemma4_text",
    "GlmAsr": "llama",
    "GotOcr2": "qwen2",
    "GraniteSpeech": "granite",
    "Idefics2": "mistral",
    "Idefics3": "llama",
    "InternVL": "qwen2",
    "Janus": "llama",
    "KimiK25": "deepseek_v3",  # as Moonshot AI publishes Kimi K2.5
    "Kimi_K25": "deepseek_v3",
    "LightOnOcr": "qwen3",
    "Llama4": "llama4_text",
    "Llava": "llama",
    "LlavaNext": "llama",
    "LlavaNextVideo": "llama",
    "LlavaOnevision": "qwen2",
    "MiniMaxM3Sparse": "minimax_m3_vl_text",
    "Mistral3": "mistral",
    "MusicFlamingo": "qwen2",
    "Ovis2": "qwen2",
    "PerceptionLM": "llama",
    "QianfanOCR": "qwen3",
    "Qwen2Audio": "qwen2",
    "Qwen2VL": "qwen2_vl_text",
    "Qwen2_5_VL": "qwen2_5_vl_text",
    "Qwen3ASR": "qwen3",
    "Qwen3VL": "qwen3_vl_text",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
    "Qwen3VLMoe": "qwen3_vl_moe_text",
    "SmolVLM": "llama",
    "VideoLlama3": "qwen2",
    "VideoLlava": "llama",
    "VipLlava": "llama",
    "Voxtral": "llama",
}
# model_type of a text part -> model_type of the text-only model with the same results for prompts
# without images.
_PLAIN_KINDS = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_VL = dict(zip(_SIZE_KEYS, (152064, 8192, 29568, 80, 64, 8, 32768), strict=True)) | {
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}
# transformers' defaults for keys that a text_config leaves out, by model_type.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    kind: dict(zip(_SIZE_KEYS, sizes, strict=True))
    for kind, sizes in {
        "llama": (32000, 4096, 11008, 32, 32, 32, 2048),
        "mistral": (32000, 4096, 14336, 32, 32, 8, 131072),
        "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768),
        "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768),
        "gemma2": (256000, 2304, 9216, 26, 8, 4, 8192),
        "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 131072),
        "llama4_text": (202048, 5120, 8192, 48, 40, 8, 131072),
        "gemma3n_text": (262400, 2048, 16384, 35, 8, 2, 32768),
        "gemma4_text": (262144, 2304, 9216, 30, 8, 4, 131072),
        "ministral3": (131072, 4096, 14336, 34, 32, 8, 262144),
        "minimax_m3_vl_text": (200064, 6144, 3072, 60, 64, 4, 524288),
        "mistral4": (131072, 4096, 12288, 36, 32, 32, 1048576),
        "granite": (32000, 4096, 11008, 32, 32, 32, 2048),
        "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, 131072),
        "glm4v_text": (151552, 4096, 13696, 40, 32, 2, 32768),
        "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, 128000),
        "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128000),
        "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 32768),
        "qwen3_5_moe_text": (248320, 2048, 512, 40, 16, 2, 32768),
    }.items()
} | {"qwen2_vl_text": _VL, "qwen2_5_vl_text": _VL}
_DEFAULT_THETAS = {
    "qwen2_vl_text": 1e6,
    "qwen2_5_vl_text": 1e6,
    "qwen3_vl_text": 5e5,
    "qwen3_5_text": 1e4,
    "qwen3_5_moe_text": 1e4,
    "qwen3_vl_moe_text": 5e5,
    "glm4v_text": 1e4,
    "glm4v_moe_text": 1e4,
}
# Values that the text parts of a model_type always have, whatever config.json says.
_FIXED: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
_SHARED_KEYS = ("quantization_config", "torch_dtype", "dtype")
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_NAME = re.compile(
    r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<inner>.+)"
    r"|(?P<plain>(?:lm_head|model\.(?:layers|embed_tokens|norm))\..+)"
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the config that a checkpoint of the text part alone would have; None if `config` is
    not multimodal.

    The result has no `architectures`; `model_type` names the family. Raises UnsupportedModel if the
    text part is not supported."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or not name.endswith(_SUFFIX):
        return None
    part = config.get("text_config")
    if part is None and config.get("vision_config") is not None:
        part = {key: value for key, value in config.items() if key != "model_type"}
    if part is None:
        return None
    if not isinstance(part, dict):
        raise UnsupportedModel(f"text_config is {part!r:.80}; it must be an object")
    default = _DEFAULT_KINDS.get(name.removesuffix(_SUFFIX))
    if default is None:
        raise UnsupportedModel(
            f"architecture {name:.80} is not supported, and neither is its text part "
            f"({part.get('model_type')!r:.80}) alone. Architectures whose text part is "
            f"supported: {', '.join(each + _SUFFIX for each in _DEFAULT_KINDS)}"
        )
    kind = part.get("model_type") or default
    text = {**_DEFAULTS.get(str(kind), {}), **part, **_FIXED.get(str(kind), {})}
    text |= {key: config[key] for key in _SHARED_KEYS if part.get(key) is None and key in config}
    if (is_tied := _is_tied(config, part)) is not None:
        text["tie_word_embeddings"] = is_tied
    if (theta := _DEFAULT_THETAS.get(str(kind))) is not None:
        text = _with_plain_rope(text, theta)
    if isinstance(quantization := text.get("quantization_config"), dict):
        text["quantization_config"] = _with_text_part_names(quantization)
    text["model_type"] = _PLAIN_KINDS.get(str(kind), kind)
    text.pop("architectures", None)
    return text


def names_in_model(
    stored: Iterable[str], *, is_text_part: bool, tensor_names: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Maps the name that each tensor has in this package to the name in the checkpoint, such as
    `model.norm.weight` to `language_model.model.norm.weight`. Tensors for images and audio are left
    out. `tensor_names` are those of the model's family (`Family`). Raises UnsupportedModel if two
    names in the checkpoint are the same tensor."""
    names: dict[str, str] = {}
    for name in stored:
        if (own := text_name(name) if is_text_part else name) is None:
            continue
        for part, ours in (tensor_names or {}).items():
            if not part.startswith("^"):
                own = own.replace(part, ours)
            elif own.startswith(part[1:]):
                own = ours + own.removeprefix(part[1:])
        if own in names:
            raise UnsupportedModel(
                f"{names[own]} and {name} are two names of the same tensor; remove one of them"
            )
        names[own] = name
    return names


def text_name(name: str) -> str | None:
    """Converts the checkpoint's name of a tensor or module to the name in the text part. Returns
    None for a name outside the text part."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    if (inner := found["inner"]) is None:
        return found["plain"]
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def _is_tied(config: Mapping[str, Any], part: Mapping[str, Any]) -> Any:
    """Returns `tie_word_embeddings`. Some versions of transformers write the field into the outer
    config (`config`), others into the text part's config (`part`)."""
    said = [each.get("tie_word_embeddings") for each in (part, config)]
    said = [each for each in said if each is not None]
    return True if True in said else next(iter(said), None)


def _with_text_part_names(quantization: dict[str, Any]) -> dict[str, Any]:
    """Returns `quantization_config` with module names of the checkpoint converted to those of the
    text part (`text_name`)."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return quantization
    own = {}
    for key, group in groups.items():
        targets = group.get("targets") if isinstance(group, dict) else None
        if isinstance(targets, list):
            names = [text_name(each) or each if isinstance(each, str) else each for each in targets]
            group = group | {"targets": names}
        own[key] = group
    return quantization | {"config_groups": own}


def _with_plain_rope(text: dict[str, Any], theta: float) -> dict[str, Any]:
    """Returns the config with ordinary RoPE in place of M-RoPE. M-RoPE gives each token three
    positions. In a prompt without images the three positions of a token are equal, so ordinary RoPE
    gives the same result."""
    plain = {"rope_theta": theta, **text}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(given := plain.get(key), dict):
            kept = {name: each for name, each in given.items() if name not in _MROPE_KEYS}
            plain[key] = {name: each for name, each in kept.items() if each != "mrope"} or None
    return plain
