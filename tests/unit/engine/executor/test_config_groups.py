"""A checkpoint whose modules have several schemes of compressed-tensors, through whole models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_kernels.native.library import Kind
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.test_zeroed_weights import (
    GROUP,
    SIZES,
    Checkpoint,
    expected_logprobs,
    int4,
    logprobs_of,
    runner_of,
)
from tests.unit.models.checkpoint.quantized import test_tensors as forms

INT = {"type": "int", "strategy": "group", "group_size": GROUP}
FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
FP8_KEY, INT4_VALUE = "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.v_proj"
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", INT4_VALUE],
            "format": "pack-quantized",
            "weights": INT | {"num_bits": 4, "symmetric": False},
        },
        "group_1": {
            "targets": ["re:.*self_attn.*"],
            "format": "pack-quantized",
            "weights": INT | {"num_bits": 8, "symmetric": True},
        },
        "group_2": {
            "targets": [r"re:.*mlp\.down_proj$", FP8_KEY],
            "format": "float-quantized",
            "weights": FLOAT,
        },
    },
    "ignore": ["lm_head"],
}


def int8(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix of 8 bits in words, and its numbers."""
    numbers = torch.randint(0, 256, (num_out, num_in), generator=forms.CHANCE)
    scales = (forms.floats(num_out, num_in // GROUP) / 640).bfloat16()
    parts = {
        "weight_packed": forms.packed(numbers, forms.BYTES),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_out, num_in]),
    }
    return parts, (numbers - 128) * scales.float().repeat_interleave(GROUP, 1)


def fp8(num_out: int, num_in: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weight = torch.randn(num_out, num_in, generator=forms.CHANCE).to(torch.float8_e4m3fn)
    scales = forms.floats(num_out, 1) / 10
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales


def matrix_of(module: str, *size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if module == FP8_KEY or module.endswith("down_proj"):
        return fp8(*size)
    return int8(*size) if "self_attn" in module and module != INT4_VALUE else int4(*size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("mixed")
    _, model = make_tiny_model("llama", path, **SIZES)
    stored: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = tensor.clone()
            continue
        parts, dequantized[name] = matrix_of(module, *tensor.shape)
        stored |= {f"{module}.{part}": each for part, each in parts.items()}
    model.load_state_dict(dequantized, strict=False)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": CONFIG}))
    return Checkpoint(path, model, Kind.Q4_Z32)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": "torch", "numerics": "invariant"},
        {"kernels": "torch", "dtype": "float32"},
        {"numerics": "invariant"},
        {"dtype": "float32"},
    ],
)
def test_log_probabilities_are_transformers(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    found = logprobs_of(checkpoint.path, **settings)
    torch.testing.assert_close(found, expected_logprobs(checkpoint.model), rtol=0, atol=1e-4)


def test_each_matrix_stays_as_it_is(checkpoint: Checkpoint) -> None:
    """But for those of a product of which some are of fp8 and others of integers."""
    runner = runner_of(checkpoint.path)
    assert runner.dtype_name.endswith("+blocks")
    assert runner.native is not None
    first, second = runner.native._model.layers[:2]
    assert first.qkv.kind == Kind.Q8_0
    assert first.qkv.rest  # the values, in int4
    assert first.attention_out.kind == Kind.Q8_0
    assert first.mlp.gate_up.kind == Kind.Q4_Z32
    assert first.mlp.down.kind in (Kind.F8_F32, Kind.F8_BF16, Kind.F8_PAIRS)
    assert second.qkv.kind in (Kind.F32, Kind.BF16, Kind.BF16_PAIRS)
    found, expected = logprobs_of(checkpoint.path), expected_logprobs(checkpoint.model)
    assert 0 < (found - expected).abs().max() < 0.1
    assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > 0.999


def test_torch_keeps_all_of_them(checkpoint: Checkpoint) -> None:
    found = logprobs_of(checkpoint.path, kernels="torch")
    expected = expected_logprobs(checkpoint.model)
    assert torch.corrcoef(torch.stack([found, expected]))[0, 1] > 0.999


def test_the_text_part_of_a_multimodal_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Names and groups are those of the whole model."""
    tensors = load_file(checkpoint.path / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"vision_tower.x": torch.ones(2)}, tmp_path / "model.safetensors")
    config = json.loads((checkpoint.path / "config.json").read_text())
    quantization = json.dumps(config.pop("quantization_config"))
    for module in (FP8_KEY, INT4_VALUE):
        quantization = quantization.replace(module, f"language_model.{module}")
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": config}
    whole["quantization_config"] = json.loads(quantization)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    shutil.copy(checkpoint.path / "tokenizer.json", tmp_path)
    found = logprobs_of(tmp_path, kernels="torch", numerics="invariant")
    torch.testing.assert_close(found, expected_logprobs(checkpoint.model), rtol=0, atol=1e-4)
