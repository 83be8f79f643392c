"""Models with random weights. They have the built-in model's tokenizer and vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder, resolve

_SIZES = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 2}),
    # Two layers of three see a window of 32 tokens.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "num_hidden_layers": 3,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make_tiny_model(path: Path, family: str = "llama", *, context_max: int = 4096) -> ModelFolder:
    """Writes a tiny model in float32, for benchmarks of all but the computation."""
    model_class, config_class, more = _FAMILIES[family]
    torch.manual_seed(7)
    config = config_class(**_SIZES, **more, max_position_embeddings=context_max)
    return write_model(path, model_class(config))


def make_llama(path: Path, **sizes: Any) -> ModelFolder:
    """Writes a Llama in bfloat16. `sizes` are arguments of LlamaConfig."""
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=_SIZES["vocab_size"], eos_token_id=2, **sizes)
    return write_model(path, LlamaForCausalLM(config).to(torch.bfloat16))


def write_model(path: Path, model: Any) -> ModelFolder:
    """Writes a model of transformers to a folder, with the built-in model's tokenizer."""
    model.save_pretrained(path)
    for file in resolve("smollm2").path.iterdir():
        if not (path / file.name).exists() and file.suffix != ".safetensors":
            (path / file.name).symlink_to(file)
    return read_folder(path)
