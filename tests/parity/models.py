"""Random models in fp32 that are small but for their vocabulary, with a real tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tandem.models.source import resolve
from tests.harness.models import HERMES_TEMPLATE

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make_random_model(
    folder: Path, window: int | None = None, *, is_gpt_oss: bool = False
) -> PreTrainedModel:
    """Saves a Llama, a Mistral whose layers all have the window, or a gpt-oss of which every second
    layer has it, and returns transformers' own model of it."""
    source = resolve("smollm2").path
    config = json.loads((source / "config.json").read_text())
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
    }
    model: PreTrainedModel
    if is_gpt_oss:
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        model = GptOssForCausalLM(
            GptOssConfig(**sizes, **experts, sliding_window=window, rope_parameters=rope)
        )
    elif window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    return model
