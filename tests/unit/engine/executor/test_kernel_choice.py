"""The reasons why Triton kernels cannot run on a CUDA device, by the device's name alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.kernel_choice import choose_kernels, why_not_triton
from tandem.errors import ConfigError
from tandem.models.config.model import ModelConfig

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CUDA = torch.device("cuda")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def model_of(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_hf(SIZES | {"architectures": [architecture]} | more)


MODEL = model_of("LlamaForCausalLM")
LATENT = model_of("DeepseekV2ForCausalLM", num_experts_per_tok=2)


def program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, as in an image without a compiler; CC is not set."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return tmp_path


def test_a_card_before_ampere_is_computed_by_torch(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(path, "gcc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert choose_kernels(EngineConfig(model="m"), CUDA, MODEL) == "torch"
    assert "the card is Tesla T4 (compute capability 7.5)" in caplog.text
    with pytest.raises(ConfigError, match=r"Triton needs compute capability 8\.0 or later"):
        choose_kernels(EngineConfig(model="m", kernels="triton"), CUDA, MODEL)


def test_without_a_c_compiler_torch_computes_and_it_is_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(EngineConfig(model="m"), CUDA, MODEL) == "torch"
    assert "The torch kernels are used" in caplog.text
    assert "C compiler" in caplog.text
    with pytest.raises(ConfigError, match="C compiler"):
        choose_kernels(EngineConfig(model="m", kernels="triton"), CUDA, MODEL)


def test_latent_attention_needs_fast_numerics(path: Path) -> None:
    program(path, "gcc")
    assert choose_kernels(EngineConfig(model="m"), CUDA, LATENT) == "triton"
    invariant = EngineConfig(model="m", numerics="invariant")
    assert choose_kernels(invariant, CUDA, LATENT) == "torch"
    with pytest.raises(ConfigError, match="cannot be used here: only the torch and native"):
        choose_kernels(replace(invariant, kernels="triton"), CUDA, LATENT)


def test_models_whose_layers_differ_in_their_heads(path: Path) -> None:
    program(path, "gcc")
    model = model_of("Gemma4ForCausalLM", num_kv_shared_layers=1, sliding_window_pattern=2)
    assert choose_kernels(EngineConfig(model="m"), CUDA, model) == "torch"
    assert choose_kernels(EngineConfig(model="m"), torch.device("cpu"), model) == "native"
    with pytest.raises(ConfigError, match="compute this model: layers have heads of different"):
        choose_kernels(EngineConfig(model="m", kernels="triton"), CUDA, model)


def test_copies_of_the_residual_stream_are_computed_by_native_kernels_and_torch(
    path: Path,
) -> None:
    program(path, "gcc")
    sizes = {"num_kv_shared_layers": 1, "sliding_window_pattern": 2}
    model, cpu = model_of("Gemma3nForCausalLM", **sizes), torch.device("cpu")
    assert choose_kernels(EngineConfig(model="m"), CUDA, model) == "torch"
    assert choose_kernels(EngineConfig(model="m"), cpu, model) == "native"
    many = model_of("Gemma3nForCausalLM", **sizes, altup_num_inputs=17)
    assert choose_kernels(EngineConfig(model="m"), cpu, many) == "torch"
    with pytest.raises(ConfigError, match="the residual stream has 17 copies, more than 16"):
        choose_kernels(EngineConfig(model="m", kernels="native"), cpu, many)


def test_int8_kv_of_latent_attention_is_computed_by_torch(path: Path) -> None:
    program(path, "gcc")
    assert choose_kernels(EngineConfig(model="m", kv_dtype="int8"), CUDA, LATENT) == "torch"
    asked = EngineConfig(model="m", kernels="triton", kv_dtype="int8")
    with pytest.raises(ConfigError, match="torch kernels read int8 KV of latent attention"):
        choose_kernels(asked, CUDA, LATENT)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Cohere2ForCausalLM", "LayerNorms and parallel blocks"),
        ("Llama4ForCausalLM", "normalize queries and keys after RoPE"),
        ("HunYuanDenseV1ForCausalLM", "normalize queries and keys after RoPE"),
    ],
)
def test_models_that_only_the_native_and_torch_kernels_compute(
    path: Path, architecture: str, reason: str
) -> None:
    program(path, "gcc")
    model = model_of(architecture)
    assert choose_kernels(EngineConfig(model="m"), CUDA, model) == "torch"
    with pytest.raises(ConfigError, match=reason):
        choose_kernels(EngineConfig(model="m", kernels="triton"), CUDA, model)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_compiler_on_the_path_is_enough(path: Path, compiler: str) -> None:
    program(path, compiler)
    assert why_not_triton(CUDA, "fast") == ""


def test_a_compiler_that_cc_names_must_be_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes CC alone where it is set, even where gcc is there."""
    program(path, "gcc")
    monkeypatch.setenv("CC", "mycc")
    assert "'mycc'" in why_not_triton(CUDA, "fast")
    program(path, "mycc")
    assert why_not_triton(CUDA, "fast") == ""


def test_the_interpreter_compiles_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not_triton(torch.device("cpu"), "fast") == ""


def test_ranks_of_torch_kernels_have_whole_heads_of_states() -> None:
    model = model_of(
        "Qwen3NextForCausalLM",
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        num_key_value_heads=4,
    )
    torch_kernels = {"model": "m", "kernels": "torch", "device": "cpu"}
    cpu = torch.device("cpu")
    assert choose_kernels(EngineConfig(**torch_kernels, tensor_parallel=2), cpu, model) == "torch"
    named = "the 6 heads of the model's states cannot be divided among 4 ranks of torch kernels; "
    with pytest.raises(ConfigError, match=named + "possible are 1, 2, 3, 6"):
        choose_kernels(EngineConfig(**torch_kernels, tensor_parallel=4), cpu, model)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel": 4}, "4 ranks of Triton"),
        ({"lora": {"a": "/a"}}, "adapters of models with"),
    ],
)
def test_what_triton_does_not_compute_with_states_is_named(
    settings: dict[str, Any], named: str
) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = model_of("Qwen3NextForCausalLM", num_key_value_heads=4, **sizes)
    with pytest.raises(ConfigError, match=f"kernels=triton cannot be used here: .*{named}"):
        choose_kernels(EngineConfig(model="m", kernels="triton", **settings), CUDA, model)
