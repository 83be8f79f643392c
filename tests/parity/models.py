"""Random models in fp32 that are small except for their vocabulary, with a real tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tandem import LLM, SamplingParams
from tandem.models.source import resolve
from tests.harness.models import HERMES_TEMPLATE

WINDOW = 40

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make_random_model(folder: Path, family: str = "llama", **more: Any) -> PreTrainedModel:
    """Saves a model and returns transformers' version of it: a Llama; a Mistral with WINDOW in all
    layers; a gpt-oss with WINDOW in every second layer; a Gemma 3 with WINDOW in two of three
    layers; a DeepSeek V3 without windows, which stores latents; a Qwen3-Next with states in two of
    three layers, which last for thousands of tokens; a Falcon-H1 with such states beside
    attention in each layer; a Kimi Linear with such states and latents; or a Gemma 4 or a MiMo V2
    Flash, whose layers with a window have heads of another size or number. `more` are settings of
    its config."""
    source = resolve("smollm2").path
    config = json.loads((source / "config.json").read_text())
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3 if family in ("gemma3", "qwen3_next") else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
    }
    model = _make(family, sizes | more).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(8.0)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    return model


def engine_tokens(
    model: str, prompts: Sequence[list[int]], *, kv_dtype: str, max_tokens: int
) -> list[list[int]]:
    """Computes the greedy completions of one engine in this process."""
    with LLM(
        model,
        device="cpu",
        numerics="invariant",
        kv_cache_dtype=kv_dtype,
        num_gpu_blocks_override=64,
        num_threads=1,
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]


def _make(family: str, sizes: dict[str, Any]) -> PreTrainedModel:
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW))
    if family == "gpt_oss":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return GptOssForCausalLM(
            GptOssConfig(**sizes, **experts, sliding_window=WINDOW, rope_parameters=rope)
        )
    if family == "deepseek_v3":
        latent = {"kv_lora_rank": 48, "q_lora_rank": 40, "qk_rope_head_dim": 16}
        heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 24, "v_head_dim": 20}
        experts = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        }
        return DeepseekV3ForCausalLM(DeepseekV3Config(**(sizes | latent | heads | experts)))
    if family == "falcon_h1":
        mamba = {"mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_d_state": 32}
        return FalconH1ForCausalLM(FalconH1Config(**sizes, **mamba, ssm_out_multiplier=0.5))
    if family == "kimi_linear":
        latent = {"kv_lora_rank": 48, "q_lora_rank": None, "qk_rope_head_dim": 16}
        heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 24, "v_head_dim": 20}
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        linear = {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "pad_token_id": None,
        }
        return KimiLinearForCausalLM(
            KimiLinearConfig(**(sizes | latent | heads | experts | linear))
        )
    if family == "qwen3_next":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        }
        linear = {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,  # a slot has more than 1 MiB, so it has two pieces
            "head_dim": 16,
        }
        return Qwen3NextForCausalLM(Qwen3NextConfig(**(sizes | experts | linear)))
    if family == "gemma4":
        own = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32}
        shared = {"num_kv_shared_layers": 2, "num_global_key_value_heads": 1}
        inputs = {"hidden_size_per_layer_input": 8} | {
            "vocab_size_per_layer_input": sizes["vocab_size"]
        }
        return Gemma4ForCausalLM(
            Gemma4TextConfig(
                **(sizes | own | shared | inputs),
                attention_k_eq_v=True,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"] * 2,
            )
        )
    if family == "mimo_v2":
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        heads = {"num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16}
        return MiMoV2FlashForCausalLM(
            MiMoV2FlashConfig(
                **(sizes | {"num_hidden_layers": 3} | experts | heads),
                sliding_window=WINDOW,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                attn_implementation="eager",
            )
        )
    config = Gemma3TextConfig(
        **sizes,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return Gemma3ForCausalLM(config)
