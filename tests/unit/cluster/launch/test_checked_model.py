"""`tandem up` names what is wrong with a model before it starts a process, by the file at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cluster.launch import checked_model
from tandem.cluster.launch.checked_model import find_local_model, with_draft_path
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.engine import EngineOptions
from tandem.common.speculation import parse_speculation
from tandem.errors import ConfigError
from tests.lora_adapters import write_adapter
from tests.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "model")[0].path


def options(model: str | Path, **engine: Any) -> LaunchOptions:
    return LaunchOptions(model=str(model), engine=EngineOptions(**engine))


def with_adapter(path: Path) -> dict[str, Any]:
    return {"lora": {"mine": str(path)}, "max_lora_rank": 8}


def test_a_model_and_its_adapters_pass(folder: Path, tmp_path: Path) -> None:
    config = make_tiny_model("llama", tmp_path / "model")[0].config
    write_adapter(tmp_path / "adapter", config, r=8)
    model = find_local_model(options(folder, **with_adapter(tmp_path / "adapter")))
    assert model is not None
    assert model.path == folder


def test_a_text_model_has_no_encode_workers(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--encode 1 cannot be used: this model takes text only"):
        find_local_model(replace(options(folder), num_encode=1))


def test_workers_that_take_no_images_have_no_encode_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_model, "read_rules", lambda model: object())
    assert find_local_model(replace(options(folder), num_encode=1)) is not None
    for engine, why in (
        ({"tensor_parallel": 2}, "several ranks"),
        ({"kernels": "triton"}, "Triton"),
    ):
        with pytest.raises(ConfigError, match=f"--encode 1 cannot be used: .*{why}"):
            find_local_model(replace(options(folder, **engine), num_encode=1))


def test_what_may_have_to_be_downloaded_is_left_for_later() -> None:
    assert find_local_model(options("some/model")) is None


def with_keys(**keys: Any) -> Callable[[Path], None]:
    """Changes keys of config.json; those that are ... are left out."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | keys
        kept = {key: value for key, value in config.items() if value is not ...}
        file.write_text(json.dumps(kept))

    return change


def with_file(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def without_file(name: str, now: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder / now)

    return change


def without_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(file).items() if k != "model.norm.weight"}
    save_file(tensors, file, metadata={"format": "pt"})


def with_tokens(number: int) -> Callable[[Path], None]:
    """Gives the tokenizer a token of this number in its vocabulary, and adds one further on."""

    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        tokenizer["model"]["vocab"]["more"] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"] = [{"id": 500, "content": "<image>", "special": True, **flags}]
        file.write_text(json.dumps(tokenizer))

    return change


def test_an_added_token_without_an_embedding_is_none_of_the_vocabulary(folder: Path) -> None:
    with_tokens(202)(folder)  # the last that has an embedding
    assert find_local_model(options(folder)) is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_file("config.json", "{"), r"config\.json cannot be read as JSON"),
        (with_file("config.json", "[]"), r"config\.json must contain a JSON object"),
        (with_file("config.json", "{}"), r"config\.json: .*\(none named\).*supported are Llama"),
        (with_keys(hidden_size=...), r"config\.json: hidden_size is None; it must be a positive"),
        (with_keys(architectures=["MambaForCausalLM"]), r"config\.json: .*MambaForCausalLM"),
        (
            with_keys(quantization_config={"quant_method": "eetq"}),
            r"config\.json: quantization_config\.quant_method is 'eetq'; supported are fp8, ",
        ),
        (with_file("generation_config.json", "?"), r"generation_config\.json cannot be read as JS"),
        (with_file("tokenizer.json", "{}"), r"tokenizer\.json cannot be read"),
        (
            with_tokens(203),
            r"tokenizer\.json .* has token ids up to 203, but vocab_size in .* 203",
        ),
        (with_file("tokenizer_config.json", "{"), r"tokenizer_config\.json cannot be read as JSON"),
        (with_file("chat_template.jinja", "{% if %}"), r"chat_template\.jinja: .*be compiled"),
        (without_tensor, r"model\.safetensors: the checkpoint lacks model\.norm\.weight of shape"),
        (
            without_file("tokenizer.json", "tokenizer.model"),
            r"has no tokenizer\.json; a model is",
        ),
        (
            without_file("model.safetensors", "pytorch_model.bin"),
            r"has no \*\.safetensors; a model is",
        ),
    ],
)
def test_a_folder_with_something_wrong(
    change: Callable[[Path], None], named: str, folder: Path
) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=named) as raised:
        find_local_model(options(folder))
    assert str(folder) in raised.value.message
    assert len(raised.value.message.splitlines()) == 1


def test_scales_of_kv_are_checked_if_they_will_be_read(folder: Path) -> None:
    file = folder / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{which}_scale": torch.ones(1)
        for layer in range(3)
        for which in "kv"
    }
    of_two = scales | {"model.layers.1.self_attn.v_scale": torch.ones(2)}
    del scales["model.layers.2.self_attn.k_scale"]
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for wrong, named in (
        (of_two, r"1\.self_attn\.v_scale has type F32 and shape \[2\]"),
        (scales, "lacks"),
    ):
        save_file(stored | wrong, file, metadata={"format": "pt"})
        assert find_local_model(options(folder)) is not None
        with pytest.raises(ConfigError, match=named) as raised:
            find_local_model(options(folder, kv_dtype="fp8_e4m3"))
        assert str(folder) in raised.value.message


def test_adapters_with_something_wrong(folder: Path, tmp_path: Path) -> None:
    model = find_local_model(options(folder))
    assert model is not None
    write_adapter(tmp_path / "wide", model.config, r=16)
    with pytest.raises(ConfigError, match=r"--lora mine: .*rank 16; max-lora-rank allows at mo"):
        find_local_model(options(folder, **with_adapter(tmp_path / "wide")))
    elsewhere = options(folder, **with_adapter(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--lora mine: .*none has no adapter_config\.json"):
        find_local_model(elsewhere)
    assert find_local_model(replace(elsewhere, listen="10.0.0.1")) is not None


def test_settings_that_the_model_cannot_have(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max-model-len is 600; it must be from 1 to 512"):
        find_local_model(options(folder, max_model_len=600))
    latent = make_tiny_model("deepseek-v3", tmp_path / "latent")[0].path
    assert find_local_model(options(latent)) is not None
    with pytest.raises(ConfigError, match="KV dtype int4 is not supported with latent attention"):
        find_local_model(options(latent, kv_dtype="int4"))


def test_a_draft_model_is_checked_and_gets_an_absolute_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("mistral-window", tmp_path / "draft")
    make_tiny_model("llama", tmp_path / "other", vocab_size=201)
    monkeypatch.chdir(tmp_path)

    def drafted(path: str) -> LaunchOptions:
        given = {"method": "draft_model", "model": path, "num_speculative_tokens": 4}
        return options(folder, speculative_config=json.dumps(given))

    model = find_local_model(drafted("./draft"))
    assert model is not None
    setting = parse_speculation(
        with_draft_path(drafted("./draft"), model).engine.speculative_config
    )
    assert setting is not None
    assert setting.model == str(tmp_path / "draft")
    assert with_draft_path(options(folder), model) == options(folder)
    with pytest.raises(ConfigError, match="its vocab_size is 201; it must be that of the model"):
        find_local_model(drafted("./other"))
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, file)
    with pytest.raises(ConfigError, match="draft"):
        find_local_model(drafted("./draft"))


@pytest.mark.parametrize(
    ("architecture", "keys", "named"),
    [
        ("mamba", {}, "GGUF architecture mamba is not supported; supported are llama, "),
        ("llama", {"split.count": 3}, "the file is one of 3 files of a model. Join"),
    ],
)
def test_gguf_files_of_other_kinds(
    architecture: str,
    keys: dict[str, int],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
    for key, value in keys.items():
        writer.add_uint16(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=rf"a\.gguf: {named}"):
        find_local_model(options(tmp_path / "a.gguf"))
    with pytest.raises(
        ConfigError, match=r"has no config\.json, but a GGUF file: give .*a\.gguf as"
    ):
        find_local_model(options(tmp_path))
