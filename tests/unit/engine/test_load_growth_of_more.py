"""Growth by loading checkpoints of compressed-tensors, and DeepSeek's GGUF files in Q8_0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

from tandem.common.config.engine import EngineConfig
from tandem.common.dtypes import compute_dtype, cpu_has_bfloat16
from tandem.models.checkpoint.weight_shapes import expected_shapes
from tandem.models.config.model import ModelConfig
from tests.tiny_models import make_tiny_model
from tests.unit.engine.test_load_growth import bytes_once_loaded, check
from tests.unit.models import conftest as tiny_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "dtype": "bfloat16",
}
GROUP = 128
# Bits, and whether there are zeros.
PRESETS = {"W4A16": (4, False), "W4A16_ASYM": (4, True), "W8A16": (8, False)}


def weights_of(num_bits: int, has_zeros: bool) -> dict[str, Any]:
    return {
        "type": "int",
        "num_bits": num_bits,
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": not has_zeros,
    }


def scales_of(*size: int) -> torch.Tensor:
    """Returns scales that float16 holds: a matrix with others would be converted."""
    return ((torch.rand(size) + 0.5) / 100).bfloat16()


def write_folder(folder: Path, preset: str) -> Path:
    """Writes a Llama with 120 MB of matrices in int4, or 240 MB in int8, as a preset says."""
    num_bits, has_zeros = PRESETS[preset]
    make_tiny_model("llama", folder)  # for its other files
    group = {"targets": ["Linear"], "weights": weights_of(num_bits, has_zeros)}
    config = json.loads((folder / "config.json").read_text()) | SIZES
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    word = 32 // num_bits
    stored: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(ModelConfig.from_hf(config), []).items():
        if not name.endswith("_proj.weight"):
            stored[name] = torch.randn(shape).bfloat16()
            continue
        (num_out, num_in), stem = shape, name.removesuffix("weight")
        packed = num_out, num_in // word
        stored[f"{stem}weight_packed"] = torch.randint(-(1 << 31), 1 << 31, packed).int()
        if has_zeros:
            zeros = num_out // word, num_in // GROUP
            stored[f"{stem}weight_zero_point"] = torch.randint(-(1 << 31), 1 << 31, zeros).int()
        stored[f"{stem}weight_scale"] = scales_of(num_out, num_in // GROUP)
        stored[f"{stem}weight_shape"] = torch.tensor(shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


HIDDEN, INNER, NUM_EXPERTS, NUM_LAYERS, HEADS = 512, 512, 32, 8, 8
PLAIN, ROPE, VALUE, RANK = 64, 32, 64, 128
# Products with latents become numbers of the compute dtype.
OF_LATENTS = {
    "attn_q": (HEADS * (PLAIN + ROPE), HIDDEN),
    "attn_kv_a_mqa": (RANK + ROPE, HIDDEN),
    "attn_kv_b": (HEADS * (PLAIN + VALUE), RANK),
}


def write_deepseek(path: Path) -> Path:
    """Writes a DeepSeek V2 with 215 MB in Q8_0, of which 5 MB are products with latents."""
    chance = np.random.default_rng(0)  # else all tokens would choose the same experts
    embedding = chance.standard_normal((len(tiny_gguf.TOKENS), HIDDEN)).astype(np.float16)
    tensors = {
        "token_embd.weight": embedding,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    quantized = OF_LATENTS | {"attn_output": (HIDDEN, HEADS * VALUE)}
    for part, num in (("exps", NUM_EXPERTS), ("shexp", 1)):
        of_all = (num,) if num > 1 else ()
        quantized |= {f"ffn_{each}_{part}": (*of_all, INNER, HIDDEN) for each in ("gate", "up")}
        quantized[f"ffn_down_{part}"] = (*of_all, HIDDEN, INNER)
    types: dict[str, gguf.GGMLQuantizationType | None] = {}
    for layer in range(NUM_LAYERS):
        name = f"blk.{layer}."
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_kv_a_norm": RANK}
        tensors |= {f"{name}{norm}.weight": np.ones(n, np.float32) for norm, n in norms.items()}
        router = chance.standard_normal((NUM_EXPERTS, HIDDEN)).astype(np.float32)
        tensors[f"{name}ffn_gate_inp.weight"] = router
        for part, (*rows, num_in) in quantized.items():
            tensors[f"{name}{part}.weight"] = np.ones((*rows, num_in // 32 * 34), np.uint8)
            types[f"{name}{part}.weight"] = gguf.GGMLQuantizationType.Q8_0
    keys = {
        "embedding_length": HIDDEN,
        "block_count": NUM_LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": PLAIN + ROPE,
        "attention.value_length": VALUE,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROPE,
        "expert_count": NUM_EXPERTS,
        "expert_used_count": 4,
        "expert_feed_forward_length": INNER,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
    }
    return tiny_gguf.write_gguf(path, tensors, architecture="deepseek2", keys=keys, types=types)


def bytes_of_deepseek(file: Path) -> list[int]:
    """Returns the bytes of each tensor once it is loaded."""
    dtype = compute_dtype(EngineConfig(model=str(file)), has_bfloat16=cpu_has_bfloat16())
    of_number = {"float32": 4, "bfloat16": 2}[dtype]
    return [
        int(tensor.n_elements) * of_number
        if tensor.name.split(".")[-2] in OF_LATENTS
        else int(tensor.n_bytes)
        for tensor in GGUFReader(file).tensors
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("preset", PRESETS)
def test_matrices_of_compressed_tensors(preset: str, kernels: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, preset)
    check(str(folder), "auto", bytes_once_loaded(folder), kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_latents_and_experts_of_a_gguf_file(kernels: str, tmp_path: Path) -> None:
    file = write_deepseek(tmp_path / "deepseek.gguf")
    check(str(file), "auto", bytes_of_deepseek(file), kernels, num_tokens=64)
