"""Layers of experts: stacked tensors, MXFP4, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.decoder_weights import ExpertWeights
from tandem.engine.executor.weights.load import load_weights
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tandem_kernels.native.library import Kind
from tests.model_engines import make_runner
from tests.step_batches import logits_after
from tests.tiny_models import make_tiny_model

PROMPTS = [
    torch.randint(0, 203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 33, 70)
]
Tensors = dict[str, torch.Tensor]


def runner_of(folder: ModelFolder, **settings: object) -> ModelRunner:
    settings = {"dtype": "float32", "block_size": 8, "max_model_len": 96} | settings
    return make_runner(folder, **settings)


def tensors_of(path: Path) -> Tensors:
    return {k: v.clone() for k, v in load_file(path / "model.safetensors").items()}


def rewrite(path: Path, tensors: Tensors) -> ModelFolder:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return read_folder(path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stacked_tensors_give_the_bits_of_separate_ones(
    family: str, dtype: str, tmp_path: Path
) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    expected = logits_after(runner_of(folder, dtype=dtype), PROMPTS[1])
    stored, stacked = tensors_of(tmp_path), {}
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    for name, tensor in stored.items():
        layer, _, part = name.rpartition(".experts.0.")
        renamed = layer.replace("block_sparse_moe", "mlp")
        if part == f"{gate}.weight":
            experts = [name.replace(".experts.0.", f".experts.{i}.") for i in range(12)]
            experts = [each for each in experts if each in stored]
            both = [[each, each.replace(f".{gate}.", f".{up}.")] for each in experts]
            stacked[f"{renamed}.experts.gate_up_proj"] = torch.stack(
                [torch.cat([stored[each] for each in parts]) for parts in both]
            )
            stacked[f"{renamed}.experts.down_proj"] = torch.stack(
                [stored[each.replace(f".{gate}.", f".{down}.")] for each in experts]
            )
        elif ".experts." not in name:
            stacked[name.replace("block_sparse_moe", "mlp")] = tensor
    runner = runner_of(rewrite(tmp_path, stacked), dtype=dtype)
    assert torch.equal(logits_after(runner, PROMPTS[1]), expected)


def make_mxfp4(path: Path) -> tuple[ModelFolder, ModelFolder]:
    """A folder whose experts are blocks and scales, and one with the numbers that these are."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2}
    make_tiny_model("gpt-oss", path / "plain", **sizes)
    plain, packed = tensors_of(path / "plain"), {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        num, num_in, num_out = tensor.shape
        blocks = torch.randint(0, 256, (num, num_out, num_in // 32, 16), generator=generator)
        scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks.byte(), scales.byte()
        expected = convert_moe_packed_tensors(
            blocks.byte(), scales.byte(), dtype=torch.float32, rows_per_chunk=1 << 20
        )
        plain[name] = expected.contiguous()
    shutil.copytree(path / "plain", path / "packed")
    config = json.loads((path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "packed" / "config.json").write_text(json.dumps(config))
    return rewrite(path / "packed", packed), rewrite(path / "plain", plain)


def test_mxfp4_that_is_converted_gives_the_bits_of_its_numbers(tmp_path: Path) -> None:
    packed, plain = (logits_after(runner_of(folder), PROMPTS[1]) for folder in make_mxfp4(tmp_path))
    assert torch.equal(packed, plain)


def test_mxfp4_stays_as_it_is(tmp_path: Path) -> None:
    """The blocks of each expert hold the numbers of its gates, ups and downs."""
    packed, plain = make_mxfp4(tmp_path)
    kept, wide = (
        load_weights(
            folder.weight_files,
            folder.config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            kept_for="native",
        ).layers[1]
        for folder in (packed, plain)
    )
    assert isinstance(kept.mlp, ExpertWeights)
    assert isinstance(wide.mlp, ExpertWeights)
    for ours, theirs in zip(kept.mlp.mlps, wide.mlp.mlps, strict=True):
        for one, other in zip(
            (*ours.gate_up, ours.down), (*theirs.gate_up, theirs.down), strict=True
        ):
            assert one.blocks is not None
            assert torch.equal(one.blocks.numbers(), other.weight)
            assert torch.equal(one.bias, other.bias)
    runner = runner_of(packed, dtype="auto")
    assert runner.native is not None
    experts = runner.native._model.layers[1].experts.contents
    mlp = experts.mlps[4]
    assert (mlp.gate_up.kind, mlp.down.kind) == (Kind.MXFP4, Kind.MXFP4)
    assert experts.router.kind != Kind.MXFP4
    found, expected = (logits_after(each, PROMPTS[1]) for each in (runner, runner_of(plain)))
    assert 0.99 < torch.corrcoef(torch.stack((found, expected)))[0, 1] < 0.999999


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gate_up_proj_scales": None}, "lacks .*gate_up_proj_scales"),
        (
            {"gate_up_proj_scales": torch.zeros(5, 64, 3).byte()},
            r"gate_up_proj_scales has shape \[5, 64, 3\]; config\.json implies \[5, 64, 2\]",
        ),
        (
            {"gate_up_proj_blocks": torch.zeros(5, 64, 2, 16)},
            "has type F32; config.json implies U8",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_named(
    wrong: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    folder, _ = make_mxfp4(tmp_path)
    tensors = tensors_of(folder.path)
    for name, tensor in wrong.items():
        name = f"model.layers.1.mlp.experts.{name}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    with pytest.raises(UnsupportedModel, match=message):
        runner_of(rewrite(folder.path, tensors))


def test_inputs_of_mxfp4_are_whole_blocks(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("gpt-oss", tmp_path)
    config = replace(folder.config, is_mxfp4=True)
    with pytest.raises(
        UnsupportedModel, match="76 inputs; in MXFP4 the number of inputs must be a multiple"
    ):
        load_weights(folder.weight_files, config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_int8_weights_leave_the_router_as_it_is(family: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_model(family, tmp_path)
    expected = logits_after(runner_of(folder), PROMPTS[1])
    runner = runner_of(folder, weights="int8")
    found = logits_after(runner, PROMPTS[1])
    assert 0.97 < torch.corrcoef(torch.stack((found, expected)))[0, 1] < 0.99999
    assert runner.native is not None
    experts = runner.native._model.layers[2].experts.contents
    assert (experts.router.kind, experts.mlps[4].down.kind) == (Kind.F32, Kind.I8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experts.4.w3.weight", r"lacks .*experts\.4\.w3\.weight"),
        ("gate.weight", r"lacks .*block_sparse_moe\.gate\.weight"),
    ],
)
def test_a_missing_tensor_of_an_expert_is_named(name: str, message: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_model("mixtral", tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors[f"model.layers.2.block_sparse_moe.{name}"]
    folder = rewrite(tmp_path, tensors)
    with pytest.raises(UnsupportedModel, match=message):
        load_weights(
            folder.weight_files, folder.config, dtype=torch.float32, device=torch.device("cpu")
        )


def test_layers_after_the_last_one_are_left_out_if_the_config_says_so(tmp_path: Path) -> None:
    """Checkpoints of DeepSeek V3 have one that predicts the token after the next."""
    folder, _ = make_tiny_model("deepseek-v3", tmp_path)
    expected = logits_after(runner_of(folder), PROMPTS[1])
    tensors = tensors_of(tmp_path)
    assert folder.config.num_extra_layers == 1
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(96, 192)
    assert torch.equal(logits_after(runner_of(rewrite(tmp_path, tensors)), PROMPTS[1]), expected)
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(96, 192)
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.4\.eh_proj\.weight"):
        runner_of(rewrite(tmp_path, tensors))


def test_a_correction_stays_float32(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("deepseek-v3", tmp_path)
    weights = load_weights(
        folder.weight_files, folder.config, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    mlp = weights.layers[1].mlp
    assert isinstance(mlp, ExpertWeights)
    assert mlp.correction is not None
    assert (mlp.correction.dtype, mlp.router.weight.dtype) == (torch.float32, torch.float32)
    assert mlp.mlps[0].down.weight.dtype == torch.bfloat16


def test_latent_kv_of_few_bits_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("deepseek-v3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match="int8 needs a model whose kv_lora_rank is a multiple of 16"
    ):
        runner_of(folder, kv_dtype="int8")
    for dtype in ("fp8_e4m3", "k8v4", "int4"):
        with pytest.raises(ConfigError, match=f"KV dtype {dtype} is not supported with latent"):
            runner_of(folder, kv_dtype=dtype)
