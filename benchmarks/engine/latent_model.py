"""A random model with latent attention, whose layers have the sizes of DeepSeek V2 Lite.

It has 4 of its 27 layers, 8 of its 64 experts, and the built-in model's vocabulary and tokenizer. A
token reads as many weights in a layer as there: 6 experts and the 2 that all tokens share.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tandem.models.source import resolve

NAME = "random-deepseek"
FOLDER = Path.home() / ".cache" / "tandem" / "peers" / "deepseek-v2-lite"
_SIZES = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
}


def latent_model() -> Path:
    """Returns the folder of the model, which is written once (1.1 GB)."""
    if not (FOLDER / "config.json").exists():
        torch.manual_seed(1)
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**_SIZES))
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(FOLDER)
        for file in resolve("smollm2").path.glob("tokenizer*"):
            (FOLDER / file.name).write_bytes(file.read_bytes())
    return FOLDER
