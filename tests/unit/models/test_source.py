import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from tandem.errors import ConfigError, UnsupportedModel
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder as transformers saves it, with a tokenizer's place taken."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    path = tmp_path / "My-Model"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_the_built_in_model():
    model = resolve("smollm2")
    assert model.name == "SmolLM2-135M-Instruct"
    assert (model.config.vocab_size, model.config.max_model_len) == (49152, 8192)
    assert model.config.eos_token_ids == (2, 0, 4)  # <|im_end|>, <|endoftext|>, <reponame>
    assert [file.name for file in model.weight_files] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert model.num_weights == 134_515_008


def test_the_second_time_is_quick_and_opens_no_gguf():
    resolve("smollm2")
    code = (
        "import sys, time; from tandem.models.source import resolve; start = time.perf_counter();"
        "resolve('smollm2'); print(time.perf_counter() - start);"
        "print(sorted({'gguf', 'huggingface_hub'} & set(sys.modules)));"
        "import tandem.models.tokenizer.detokenizer, tandem.models.tokenizer.stop;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, *loaded = run.stdout.split("\n")
    assert float(seconds) < 5  # 0.01 by itself; beside others on two cores, seconds
    assert loaded == ["[]", "[]", ""]


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (0, 2)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (0, 2)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (0, 2)),
        (
            {
                "tokenizer_config": {"eos_token": "<|endoftext|>"},
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            (0,),
        ),
        ({"tokenizer_config": {"eos_token": "\u0120the"}}, (0, 260)),  # no special token
        ({"tokenizer_config": {"eos_token": "no token of it"}}, (0,)),
        ({"tokenizer_config": {"eos_token": None}}, (0,)),
        ({"config": {"eos_token_id": [2, 17]}}, (0, 2, 17)),
        ({"config": {"text_config": {"eos_token_id": 17}, "eos_token_id": None}}, (0, 17)),
        ({"generation_config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
        (
            {
                "tokenizer_config": {
                    "eos_token": "<|im_end|>",
                    "added_tokens_decoder": {"5": {"content": "<|im_end|>"}},
                }
            },
            (0, 5),
        ),
    ],
)
def test_the_ends_of_a_folder_are_those_of_all_its_files(folder, settings, ends):
    shutil.copy(resolve("smollm2").path / "tokenizer.json", folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    files = {"generation_config": {"eos_token_id": 0}} | settings
    files["config"] = config | files.get("config", {})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert resolve(str(folder)).config.eos_token_ids == ends
    assert Tokenizer(folder).eos_token_ids == ends


def test_an_end_id_without_a_token_is_logged(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 32]}))
    assert resolve(str(folder)).config.eos_token_ids == (2, 32)
    assert (
        f"{folder}: eos_token_id 32 never ends an answer, because the model has no such token: "
        "its vocab_size is 32" in caplog.messages
    )


def test_an_end_token_that_is_none_is_named(folder):
    for wrong in (5, ["</s>"], {"text": "</s>"}, {"content": 5}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token is .*must be a"):
            resolve(str(folder))


def test_a_converted_model_keeps_its_name_when_given_as_a_folder():
    model = resolve("smollm2")
    assert resolve(str(model.path)) == model


def test_a_folder(folder):
    model = resolve(str(folder))
    assert (model.path, model.name) == (folder, "My-Model")
    assert model.config.num_kv_heads == 2
    assert model.weight_files == (folder / "model.safetensors",)


def test_a_gguf_file(tmp_path, tiny_gguf):
    norm = {"output_norm.weight": np.ones(64, np.float32)}
    file = tiny_gguf.write(tmp_path / "tiny.Q8_0.gguf", norm)
    model = resolve(str(file), cache_dir=tmp_path)
    assert model.name == "tiny"
    assert model.path.is_relative_to(tmp_path / "models")


def test_the_folder_of_a_gguf_file_follows_it(tmp_path, tiny_gguf):
    norm = {"output_norm.weight": np.ones(64, np.float32)}
    first = tiny_gguf.write(tmp_path / "tiny.Q8_0.gguf", norm)
    folder = resolve(str(first), cache_dir=tmp_path).path
    (tmp_path / "new").mkdir()
    moved = first.rename(tmp_path / "new" / first.name)
    with pytest.raises(ConfigError, match="no longer exists"):
        resolve(str(folder))
    assert resolve(str(moved), cache_dir=tmp_path).path == folder
    assert resolve(str(folder)).weight_files == (moved,)


def test_the_same_files_elsewhere_have_the_same_fingerprint(folder, tmp_path):
    first = resolve(str(folder)).fingerprint
    moved = folder.rename(tmp_path / "moved")
    assert resolve(str(moved)).fingerprint == first


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "first", "last", "header"])
def test_every_part_counts_in_the_fingerprint(folder, changed):
    before = resolve(str(folder)).fingerprint
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    if changed == "first":
        content[8 + header_bytes] ^= 1
    elif changed == "last":
        content[-1] ^= 1
    elif changed == "header":
        content[8 : 8 + header_bytes] = content[8 : 8 + header_bytes].replace(b"norm", b"morn")
    else:
        (folder / changed).write_text((folder / changed).read_text() + "\n")
    weights.write_bytes(content)
    assert resolve(str(folder)).fingerprint != before


def test_the_index_says_which_weight_files_count(folder):
    save_file({"x": np.zeros(1)}, folder / "consolidated.safetensors")
    assert [file.name for file in resolve(str(folder)).weight_files] == ["model.safetensors"]
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"y": np.zeros(1)}, folder / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = [file.name for file in resolve(str(folder)).weight_files]
    assert files == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no 'b\.safetensors', which .*index\.json names"):
        resolve(str(folder))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(
        ConfigError, match=rf"has no \S*{Path(missing).suffix}.*Hugging Face folder"
    ):
        resolve(str(folder))


def test_weights_that_are_cut_short_are_named_before_they_are_read(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short: its tensors take \d+"):
        resolve(str(folder))
    for header in (b"<!DOCTYPE html>", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
            resolve(str(folder))


def test_files_that_are_broken(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a safetensors file, or is cut short"):
        resolve(str(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json must contain a JSON object, not a list"):
        resolve(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        resolve(str(folder))


def test_a_model_that_cannot_be_run(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        resolve(str(folder))


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./nothing", "~/no-such-model", "missing.gguf", "not a name", "a/b/c/d"],
)
def test_nothing_found_says_what_is_accepted(model):
    with pytest.raises(ConfigError, match=r"Hugging Face folder.*\.gguf file.*smollm2.*hub name"):
        resolve(model)


def test_a_hub_name_without_a_hub_fails_soon_and_clearly(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(
        ConfigError, match="some/model is not a folder on this machine and cannot be downloaded"
    ):
        resolve("some/model", cache_dir=tmp_path)
    assert time.monotonic() - start < 10


def test_a_hub_name_that_was_downloaded_before(folder, tmp_path, monkeypatch):
    """The hub's own cache, laid out as a download leaves it; nothing but the network is missing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("c0ffee" + "0" * 34)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / ("c0ffee" + "0" * 34))
    model = resolve("some/model", cache_dir=tmp_path)
    assert model.name == "some/model"
    assert model.config.vocab_size == 32


def test_a_revision_of_a_hub_model_is_that_one(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--some--model"
    (repository / "refs").mkdir(parents=True)
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)

    def commit_of(revision: str) -> str:
        return resolve("some/model", revision=revision, cache_dir=tmp_path).path.name

    assert commit_of("") == commits["main"]
    assert commit_of("v1") == commit_of(commits["v1"]) == commits["v1"]
    with pytest.raises(ConfigError, match=r"some/model.* cannot be downloaded"):
        commit_of("c" * 40)


def test_what_is_no_hub_model_has_no_revision(folder, tmp_path):
    for model in ("smollm2", str(folder), str(tmp_path / "x.gguf")):
        with pytest.raises(
            ConfigError, match="is not a model of the Hugging Face hub, so the revision 'v1'"
        ):
            resolve(model, revision="v1")
