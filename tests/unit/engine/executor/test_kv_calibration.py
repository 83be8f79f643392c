from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor import kv_calibration
from tandem.engine.executor.kv_calibration import FILE, calibrate, key_channels
from tandem.engine.executor.runner import ModelRunner
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import CACHE_DIR_VARIABLE
from tests.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFolder:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return make_tiny_model("llama", tmp_path / "model")[0]


def cached(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "kv_calibration").iterdir()
    return file


def test_channels_are_those_of_the_models_keys_and_queries(folder: ModelFolder) -> None:
    channels = calibrate(folder)
    config = folder.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    assert channels.order.shape == channels.scales.shape == shape
    quarter = config.head_dim // 4
    for part in channels.order.tensor_split([quarter], -1):
        assert torch.equal(part, part.sort(-1).values)
    exponents = 4 * channels.scales.double().log2()
    assert torch.allclose(exponents[..., quarter:], exponents[..., quarter:].round(), atol=1e-6)
    assert calibrate(folder).digest == channels.digest


def test_a_channel_that_attention_hears_most_is_among_the_fine_ones(folder: ModelFolder) -> None:
    file = folder.weight_files[0]
    tensors = load_file(file)
    config = folder.config
    for part in "qk":
        weight = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        weight.view(-1, config.head_dim, config.hidden_size)[:, 5] *= 50
    save_file(tensors, file, metadata={"format": "pt"})
    channels = calibrate(folder)
    fine = channels.order[1, :, : config.head_dim // 4]
    assert bool((fine == 5).any(-1).all())


def test_they_are_computed_once(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key_channels(folder)
    monkeypatch.setattr(kv_calibration, "calibrate", lambda _: pytest.fail("computed again"))
    assert key_channels(folder).digest == first.digest
    assert cached(tmp_path).name.startswith(folder.fingerprint)


def test_a_file_in_the_models_folder_comes_first(folder: ModelFolder, tmp_path: Path) -> None:
    channels = key_channels(folder)
    given = {"order": channels.order, "scales": 2 * channels.scales}
    save_file(given, folder.path / FILE)
    assert torch.equal(key_channels(folder).scales, 2 * channels.scales)
    config = EngineConfig(model="", device="cpu", kv_dtype="int4", num_blocks=4)
    runners = [ModelRunner(folder, config)]
    (folder.path / FILE).unlink()
    runners.append(ModelRunner(folder, config))
    names = [runner.kv_dtype_name for runner in runners]
    assert names[0] != names[1]
    assert all(name.startswith("int4-") for name in names)


@pytest.mark.parametrize("broken", ["shape", "order", "scales", "missing", "bytes"])
def test_a_file_of_another_model_is_refused_by_name(folder: ModelFolder, broken: str) -> None:
    channels = calibrate(folder)
    tensors = {"order": channels.order, "scales": channels.scales}
    file = folder.path / FILE
    if broken == "shape":
        tensors = {name: tensor[1:].contiguous() for name, tensor in tensors.items()}
    elif broken == "order":
        tensors["order"] = torch.zeros_like(channels.order)
    elif broken == "scales":
        tensors["scales"] = -channels.scales
    elif broken == "missing":
        del tensors["scales"]
    save_file(tensors, file)
    if broken == "bytes":
        file.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=FILE):
        key_channels(folder)
