"""Loading checkpoints: what is refused and by what name, and what is not copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.executor.weights.decoder_weights import ModelWeights
from tandem.engine.executor.weights.load import load_weights
from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return make_tiny_model("llama", tmp_path)[0]


def load(folder: ModelFolder, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder.weight_files, folder.config, dtype=dtype, device=CPU)


def rewrite(folder: ModelFolder, tensors: Tensors) -> None:
    save_file(tensors, folder.path / "model.safetensors", metadata={"format": "pt"})


def stored(folder: ModelFolder) -> Tensors:
    # Cloned: a file that is mapped must not be written over.
    return {k: v.clone() for k, v in load_file(folder.path / "model.safetensors").items()}


def mapped_file(address: int) -> str:
    """The file that this process has mapped there, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in span.split("-"))
        if first <= address < end:
            return "".join(file)
    return ""


def test_a_missing_tensor_is_named(folder: ModelFolder) -> None:
    tensors = stored(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_surplus_tensor_is_named(folder: ModelFolder) -> None:
    tensors = stored(folder)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_a_broken_file_is_named(folder: ModelFolder) -> None:
    (folder.path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is not a safetensors file, or is cut short"
    ):
        load(folder)


def test_many_names_are_counted(folder: ModelFolder) -> None:
    rewrite(folder, {k: v for k, v in stored(folder).items() if ".layers.2." not in k})
    with pytest.raises(UnsupportedModel, match=r"and 6 more tensors"):
        load(folder)


def test_a_wrong_shape_is_named_with_the_right_one(folder: ModelFolder) -> None:
    tensors = stored(folder)
    tensors["model.norm.weight"] = torch.ones(47)
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has shape \[47\].*\[96\]"):
        load(folder)


def test_integers_are_refused(folder: ModelFolder) -> None:
    tensors = stored(folder)
    tensors["model.norm.weight"] = torch.ones(96, dtype=torch.int8)
    rewrite(folder, tensors)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has type I8"):
        load(folder)


def test_tables_of_old_checkpoints_are_ignored(folder: ModelFolder) -> None:
    tensors = stored(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    rewrite(folder, tensors)
    assert len(load(folder).layers) == 3


def test_a_tied_output_is_the_embedding_even_if_it_is_stored_again(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("qwen3", tmp_path)
    tensors = stored(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors)
    weights = load(folder)
    assert weights.output is weights.embedding


def test_tensors_stored_in_the_compute_dtype_are_mapped_and_never_joined(
    folder: ModelFolder,
) -> None:
    weights = load(folder)
    file = stored(folder)
    assert len(weights.layers[0].qkv) == 3
    assert len(weights.layers[0].mlp.gate_up) == 2
    assert torch.equal(
        weights.layers[2].qkv[1].weight, file["model.layers.2.self_attn.k_proj.weight"]
    )
    assert mapped_file(weights.output.data_ptr()) == str(folder.path / "model.safetensors")


def test_converted_tensors_are_joined(tmp_path: Path) -> None:
    folder, _ = make_tiny_model("llama-linear-biases", tmp_path)
    file = stored(folder)
    (joined,) = load(folder, torch.bfloat16).layers[0].qkv
    name = "model.layers.0.self_attn"
    expected = torch.cat([file[f"{name}.{part}_proj.weight"] for part in "qkv"]).bfloat16()
    assert torch.equal(joined.weight, expected)
    assert joined.bias is not None
    assert joined.bias.shape == (96 + 2 * 32,)


def test_several_files(folder: ModelFolder) -> None:
    tensors = stored(folder)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder.path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = folder.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder.path / "model.safetensors").unlink()
    weights = load(read_folder(folder.path))
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
