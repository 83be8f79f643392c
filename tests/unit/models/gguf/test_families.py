"""Families in GGUF files: the engine's logits are those of the models that the files came from."""

from __future__ import annotations

import ctypes
import math
import statistics
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.engine.executor.runner import ModelRunner
from tandem.errors import UnsupportedModel
from tandem.models.gguf.config import ARCHITECTURES
from tandem.models.gguf.convert import converted_folder
from tandem.models.gguf.export import export
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind, Matrix
from tests.model_engines import make_runner
from tests.step_batches import logits_after
from tests.unit.models.conftest import gguf_tensors, split_latent, write_gguf

_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_NO_PAD = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_OF_GEMMA = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": 8,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.1],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
_FILE_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_OF_DEEPSEEK: dict[str, Any] = {
    "rope.dimension_count": 16,
    "attention.kv_lora_rank": 32,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 64,
    "leading_dense_block_count": 1,
}
_OF_LITE = _OF_DEEPSEEK | {  # as older converters wrote it
    "attention.head_count_kv": 4,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
}
_OF_SPLIT = (
    _OF_DEEPSEEK
    | _FILE_YARN
    | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 32,
        "attention.key_length": 48,  # of a token's latent and key
        "attention.value_length": 32,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_count": 1,
    }
)
_GROUPS = {"q_lora_rank": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
_ROUNDED_YARN = {name: value for name, value in _YARN.items() if name != "truncate"}
_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "pad_token_id": None,
}
_OF_HEADS = {"attention.key_length": 16, "attention.value_length": 16}
_OF_LINEAR = _OF_HEADS | {
    "rope.dimension_count": 8,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
_SHARED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}
_OF_SHARED_EXPERTS = {
    "feed_forward_length": None,
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
}
_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": None,
}
_OF_WINDOWS = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False],
}
_PARTIAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}
# Tables that a file has beside the tensors of transformers.
_TABLES = {
    "phi3-longrope": {
        f"rope_factors_{kind}.weight": np.array(_LONGROPE[f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
    }
}
# Of a file: its architecture, transformers' name, what the config and the file have beyond sizes.
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-dense": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-window": ("mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": (
        "qwen3",
        {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "llama": ("mixtral", _EXPERTS, {"expert_count": 5, "expert_used_count": 2}),
    "qwen3moe": (
        "qwen3_moe",
        _EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 16},
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1], **_NO_PAD}, {}),
    "olmo2": ("olmo2", {}, {}),
    "gemma2": (
        "gemma2",
        _GEMMA
        | {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # the others know no cap
        },
        _OF_GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        _OF_GEMMA | {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0},
    ),
    "granite": (
        "granite",
        _GRANITE,
        {
            "embedding_scale": 3.0,
            "attention.scale": 0.1,
            "residual_scale": 0.6,
            "logit_scale": 2.5,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8, **_NO_PAD}, {"attention.sliding_window": 8}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": _LONGROPE,
            "sliding_window": None,
            **_NO_PAD,
        },
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 16) / math.log(16)),
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        _EXPERTS
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": _YARN,
            "pad_token_id": None,
        },
        _FILE_YARN
        | {
            "expert_count": 5,
            "expert_used_count": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 8,
        },
    ),
    "deepseek2": ("deepseek_v2", _DEEPSEEK | {"q_lora_rank": None}, _OF_LITE),
    "deepseek2-groups": (
        "deepseek_v2",
        _DEEPSEEK
        | _GROUPS
        | {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": _ROUNDED_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        _OF_SPLIT
        | {
            "expert_gating_func": 1,
            "expert_weights_scale": 1.5,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "deepseek2-sigmoid": (
        "deepseek_v3",
        _DEEPSEEK
        | _GROUPS
        | {"rope_parameters": _ROUNDED_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        _OF_SPLIT
        | {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        _LINEAR | _SHARED_EXPERTS,
        _OF_LINEAR | _OF_SHARED_EXPERTS,
    ),
    "qwen35": ("qwen3_5_text", _LINEAR, _OF_LINEAR | {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen35moe": (
        "qwen3_5_moe_text",
        _LINEAR | _SHARED_EXPERTS,
        _OF_LINEAR | _OF_SHARED_EXPERTS | {"rope.dimension_sections": [3, 3, 2, 0]},
    ),
    "glm4": (
        "glm4",
        {"head_dim": 16, "attention_bias": True, **_PARTIAL_ROPE, **_NO_PAD},
        _OF_HEADS | {"rope.dimension_count": 8},
    ),
    "glm4moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            **_PARTIAL_ROPE,
            **_NO_PAD,
        },
        _OF_HEADS
        | {
            "rope.dimension_count": 8,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        _EXPERTS | {"head_dim": 16, "rotary_dim": 8, **_NO_PAD},
        _OF_HEADS
        | {
            "rope.dimension_count": 8,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "expert_gating_func": 2,
        },
    ),
    "seed_oss": (
        "seed_oss",
        {"head_dim": 32, "attention_out_bias": True, **_NO_PAD},
        {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, **_NO_PAD}, _OF_HEADS),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            **_NO_PAD,
        },
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_count": 2,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 16, **_NO_PAD}, _OF_HEADS),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 5, "moe_topk": [2, 2], **_NO_PAD},
        _OF_HEADS
        | {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
        },
    ),
    "exaone4": ("exaone4", _WINDOWS, _OF_WINDOWS),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, **_NO_PAD},
        {},
    ),
    "cohere2": (
        "cohere2",
        _WINDOWS | {"logit_scale": 0.3, "layer_norm_eps": 1e-3, "head_dim": 16},
        _OF_WINDOWS
        | {
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": 1e-3,
            "logit_scale": 0.3,
        },
    ),
    "olmo2-windows": (
        "olmo3",
        _WINDOWS
        | {
            "rope_parameters": {
                "full_attention": _ROUNDED_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        _OF_WINDOWS | _FILE_YARN,
    ),
}


def files_of(architecture: str) -> list[str]:
    """Returns the names of the files whose models transformers computes with this class."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name, (kind, *_) in _FAMILIES.items() if names[kind] == architecture]


def _architecture(name: str) -> str:
    """Returns what a file names as its architecture."""
    return name if name in ARCHITECTURES else name.partition("-")[0]


def make_origin(name: str, vocab_size: int) -> transformers.PreTrainedModel:
    model_type, options, _ = _FAMILIES[name]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | options))
    origin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in origin.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for part, buffer in origin.named_buffers():
        if part.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return origin


def file_of(
    name: str,
    origin: transformers.PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType | None = None,
    dense: tuple[str, ...] = (),
) -> Path:
    """Writes a model as a file. The matrices of its layers are of `kind`, if given, except those
    that `dense` names."""
    keys = _FAMILIES[name][2]
    tensors = gguf_tensors(origin)
    if "attention.key_length_mla" in keys:
        tensors = split_latent(tensors, origin.config)
    is_quantized = [
        kind is not None
        and array.ndim > 1
        and part.startswith("blk.")
        and part.endswith("weight")
        and not {"ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", *dense} & {part.split(".")[2]}
        for part, array in tensors.items()
    ]
    types = {part: kind for part, chosen in zip(tensors, is_quantized, strict=True) if chosen}
    for part in types:
        tensors[part] = gguf.quantize(tensors[part], kind)
    return write_gguf(
        path,
        tensors | _TABLES.get(name, {}),
        architecture=_architecture(name),
        keys=keys,
        types=types,
    )


def runner_of(file: Path, **settings: Any) -> ModelRunner:
    folder = read_folder(converted_folder(file, cache_dir=file.parent))
    return make_runner(folder, **settings)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", _FAMILIES)
def test_logits_are_those_of_the_origin(
    name: str, kernels: Any, tmp_path: Path, tiny_gguf: Any
) -> None:
    origin = make_origin(name, tiny_gguf.vocab_size)
    file = file_of(name, origin, tmp_path / "tiny.gguf")
    runner = runner_of(file, dtype="float32", kernels=kernels)
    prompt = torch.arange(20).tolist()
    for _ in range(3):
        with torch.no_grad():
            expected = origin(torch.tensor([prompt])).logits[0, -1]
        found = logits_after(runner, prompt)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.argmax() == expected.argmax()
        prompt.append(int(found.argmax()))


@pytest.mark.parametrize("name", _FAMILIES)
def test_an_exported_folder_has_the_numbers_of_the_origin_or_is_refused(
    name: str, tmp_path: Path, tiny_gguf: Any
) -> None:
    origin = make_origin(name, tiny_gguf.vocab_size)
    file = file_of(name, origin, tmp_path / "tiny.gguf")
    folder = read_folder(converted_folder(file, cache_dir=tmp_path))
    stored = origin.state_dict()
    if any(".experts." in part or "kv_b_proj" in part or "qkvz" in part for part in stored):
        with pytest.raises(UnsupportedModel, match=r"cannot be exported, because .* another form"):
            export(folder, tmp_path / "whole")
        assert not (tmp_path / "whole").exists()
        return
    found = load_file(export(folder, tmp_path / "whole") / "model.safetensors")
    if origin.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    assert found.keys() == stored.keys()
    for part, numbers in found.items():
        torch.testing.assert_close(numbers, stored[part], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "packed"),
    [
        ("llama", "Q4_0", Kind.Q4_0),
        ("glm4moe", "Q4_0", Kind.Q4_0),
        ("qwen3moe", "Q8_0", Kind.Q8_0),
        ("gpt-oss", "MXFP4", Kind.MXFP4),
        ("phi3-longrope", "Q5_1", Kind.Q5_1),
        ("deepseek2-sigmoid", "Q8_0", Kind.Q8_0),
    ],
)
def test_quantized_matrices_stay_as_they_are(
    name: str, kind: str, packed: Kind, tmp_path: Path, tiny_gguf: Any
) -> None:
    """Experts, and fused matrices with a part of each head without positions. Products of latents
    become numbers."""
    origin = make_origin(name, tiny_gguf.vocab_size)
    file = file_of(name, origin, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    kept = runner_of(file)
    wide = runner_of(file, dtype="float32")
    assert kept.native is not None
    layer = kept.native._model.layers[1]
    mlp = layer.experts.contents.mlps[4] if layer.experts else layer.mlp
    products = layer.attention_out, mlp.gate_up, mlp.down, *(() if layer.latent else (layer.qkv,))
    assert {product.kind for product in products} == {packed}
    prompt = torch.arange(20).tolist()
    both = torch.stack([logits_after(runner, prompt) for runner in (kept, wide)])
    assert 0.99 < torch.corrcoef(both)[0, 1] < 0.999999


@pytest.mark.parametrize("rates", ["Q8_0", "F32"])
@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "qwen35moe"])
def test_linear_attention_stays_quantized(
    name: str, rates: str, tmp_path: Path, tiny_gguf: Any
) -> None:
    """The inputs of the output matrix are in llama.cpp's order. The matrices of b and a may be
    numbers beside quantized ones."""
    origin = make_origin(name, tiny_gguf.vocab_size)
    kind = gguf.GGMLQuantizationType.Q8_0
    dense = ("ssm_ba", "ssm_alpha", "ssm_beta") if rates == "F32" else ()
    file = file_of(name, origin, tmp_path / "tiny.gguf", kind, dense=dense)
    kept = runner_of(file)
    wide = runner_of(file, dtype="float32", kernels="torch")
    assert kept.native is not None
    linear, full = (kept.native._model.layers[layer] for layer in range(2))
    for product in (linear.qkv, linear.attention_out, full.qkv, full.attention_out):
        assert product.kind == Kind.Q8_0
    assert full.num_gates
    rest = linear.qkv.rest
    assert (ctypes.cast(rest, ctypes.POINTER(Matrix))[0].kind == Kind.F32) if dense else not rest
    alike = []
    for length in (8, 13, 20, 21, 30):
        prompt = torch.arange(length).tolist()
        both = torch.stack([logits_after(runner, prompt) for runner in (kept, wide)])
        alike.append(float(torch.corrcoef(both)[0, 1]))
    # It is 0.1 with the inputs of the output matrix in another order. One of the prompts may differ
    # more, because rounding chooses other experts.
    assert statistics.median(alike) > 0.98
