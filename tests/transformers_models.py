"""Tiny random models that the transformers library computes, also in workers (`--model-impl
transformers`). Tandem's own decoders have some of them, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.tiny_models import character_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Name of a model -> its config class, and settings beside the common sizes.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "olmoe": ("OlmoeConfig", _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4Config", _GROUPED | {"head_dim": 16}),
    "nemotron": ("NemotronConfig", _GROUPED | {"partial_rotary_factor": 0.5}),
    "apertus": ("ApertusConfig", _GROUPED | {"rope_parameters": _ROPE}),
    "starcoder2": ("Starcoder2Config", _GROUPED | {"sliding_window": 24}),
    "cohere2": ("Cohere2Config", _GROUPED | _WINDOWS | {"logit_scale": 0.5}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            **_GROUPED,
            **_WINDOWS,
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        },
    ),
}
MODELS = tuple(_MODELS)


def make_model(name: str, path: Path, **more: Any) -> PreTrainedModel:
    """Writes a model folder as from the hub, and returns transformers' model in fp32. `more` are
    settings of its config."""
    config_class, beyond = _MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**(_SIZES | beyond | more))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1 and float(parameter.mean()) == 1.0
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_norm)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    return model
