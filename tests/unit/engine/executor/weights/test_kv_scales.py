"""Static scales of fp8 KV: read from checkpoints of both makers, kept in the pool, told in the name
of the KV data type; and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.config.engine import KvDtype
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.kv_scales import fixed_scales
from tandem.engine.scheduler.batch import StepBatch
from tandem.errors import UnsupportedModel
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.model_engines import make_runner
from tests.step_batches import place
from tests.tiny_models import make_tiny_model

NAMES = ("model.layers.{}.self_attn.{}_scale", "model.layers.{0}.self_attn.{1}_proj.{1}_scale")
FUSED = "model.layers.{}.self_attn.qkv_proj.{}_scale"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_ONLY = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}


def scales_of(num_layers: int, names: str = NAMES[0]) -> dict[str, torch.Tensor]:
    """The scales 0.011, 0.012, 0.013 ...: of K, of V, of the next layer's K ..."""
    return {
        names.format(layer, which): torch.tensor([0.011 + (2 * layer + i) / 1000])
        for layer in range(num_layers)
        for i, which in enumerate("kv")
    }


def folder_of(
    path: Path,
    scales: Mapping[str, torch.Tensor],
    quantization: Any = KV_ONLY,
    family: str = "llama",
) -> ModelFolder:
    made, _ = make_tiny_model(family, path)
    file, config = path / "model.safetensors", path / "config.json"
    save_file(load_file(file) | dict(scales), file, metadata={"format": "pt"})
    quantized = {"quantization_config": quantization}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantized))
    assert made.path == path.resolve()
    return read_folder(path)


def runner_of(folder: ModelFolder, kernels: str, kv_dtype: KvDtype = "fp8_e4m3") -> ModelRunner:
    return make_runner(folder, dtype="float32", kernels=kernels, kv_dtype=kv_dtype, num_blocks=4)


@pytest.fixture
def num_layers(tmp_path: Path) -> int:
    return make_tiny_model("llama", tmp_path / "shape")[0].config.num_layers


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    ("family", "names"), [("llama", NAMES[0]), ("llama", NAMES[1]), ("phi3", FUSED)]
)
def test_the_pool_has_the_checkpoints_scales(
    family: str, names: str, kernels: str, num_layers: int, tmp_path: Path
) -> None:
    runner = runner_of(folder_of(tmp_path, scales_of(num_layers, names), family=family), kernels)
    (sequence,) = place(runner, [[1, 2, 3, 4, 5]])
    logits = runner.forward(StepBatch([sequence.take(5)]))
    assert bool(logits.isfinite().all())
    (pool,) = runner.pools
    wanted = torch.tensor([0.011 + i / 1000 for i in range(2 * num_layers)])
    for layer in range(num_layers):
        numbers, scales, _ = pool.layer(layer)
        assert scales is not None
        of_block = scales[sequence.block_table[0], ..., :5].float()
        for which, scale in enumerate(wanted[2 * layer : 2 * layer + 2].tolist()):
            stored = of_block[:, which].unique()
            assert len(stored) == 1
            assert scale <= float(stored) <= scale * (1 + 2**-10)
        assert int(numbers[sequence.block_table[0], ..., :5, :].count_nonzero()) > 0


def test_scales_are_told_in_the_kv_dtype(num_layers: int, tmp_path: Path) -> None:
    scales = scales_of(num_layers)
    folders = [
        folder_of(tmp_path / "one", scales),
        folder_of(tmp_path / "same", scales_of(num_layers, NAMES[1])),
        folder_of(tmp_path / "other", {name: 2 * scale for name, scale in scales.items()}),
        folder_of(tmp_path / "none", {}, None),
        folder_of(
            tmp_path / "dynamic", {}, KV_ONLY | {"kv_cache_scheme": SCHEME | {"dynamic": True}}
        ),
    ]
    names = [runner_of(folder, "torch").kv_dtype_name for folder in folders]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("fp8_e4m3-") for name in names[:3])
    assert names[3:] == ["fp8_e4m3"] * 2


def test_another_kv_dtype_leaves_them_and_says_so(
    num_layers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, scales_of(num_layers))
    with caplog.at_level(logging.WARNING):
        assert runner_of(folder, "torch", "int8").kv_dtype_name == "int8"
    assert "are not used, because kv-dtype is int8" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NAMES[0].format(1, "v"), None, "lacks v_scale of layer 1"),
        (NAMES[0].format(0, "k"), torch.tensor(-1.0), "k_scale is .*above 0"),
        (NAMES[0].format(0, "k"), torch.tensor(torch.nan), "k_scale is .*above 0"),
        (NAMES[0].format(0, "v"), torch.tensor(1e6), "v_scale is .*at most 65504"),
        (NAMES[0].format(0, "k"), torch.ones(2), "k_scale has .*a single floating-point number"),
    ],
)
def test_a_scale_that_is_missing_or_none_is_refused_by_name(
    name: str, value: torch.Tensor | None, message: str, num_layers: int, tmp_path: Path
) -> None:
    scales = scales_of(num_layers)
    if value is None:
        del scales[name]
    else:
        scales[name] = value
    with pytest.raises(UnsupportedModel, match=message):
        fixed_scales(folder_of(tmp_path, scales))


def test_scales_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="lacks k_scale of layer 0"):
        fixed_scales(folder_of(tmp_path, {}))


def test_layers_without_kv_need_no_scales(tmp_path: Path) -> None:
    shape, _ = make_tiny_model("qwen3-next", tmp_path / "shape")
    layers = [n for n, layer in enumerate(shape.config.layers) if layer.has_attention]
    assert 0 < len(layers) < shape.config.num_layers
    all_scales = scales_of(shape.config.num_layers)
    scales = {
        name: scale
        for name, scale in all_scales.items()
        if any(name.startswith(f"model.layers.{layer}.") for layer in layers)
    }
    folder = folder_of(tmp_path / "model", scales, family="qwen3-next")
    static = fixed_scales(folder)
    assert static is not None
    of_layers = static.of_layers(layers, torch.device("cpu"))
    for number, layer in enumerate(layers):
        stored = torch.cat([scales[NAMES[0].format(layer, which)] for which in "kv"])
        assert of_layers.scales[number].float() == pytest.approx(stored, rel=2**-9)
    assert runner_of(folder, "torch").kv_dtype_name.startswith("fp8_e4m3-")
