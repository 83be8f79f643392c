import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.gguf import convert as gguf_convert
from tandem.models.gguf.convert import converted_folder, model_name
from tandem.models.gguf.tensors import read_tensors
from tandem.models.shape import read_shape
from tandem.models.source import resolve

NORM = {"output_norm.weight": np.arange(64, dtype=np.float32)}


def test_a_conversion_is_made_once(tmp_path, tiny_gguf, monkeypatch):
    file = tiny_gguf.write(tmp_path / "tiny.Q4_1.gguf", NORM)
    folder = converted_folder(file, cache_dir=tmp_path / "cache")
    assert folder.parent == tmp_path / "cache/models"
    assert folder.name.startswith("tiny-")
    assert json.loads((folder / "tandem_conversion.json").read_text())["num_weights"] == 64
    assert not list(folder.glob("*.safetensors"))
    monkeypatch.setattr(gguf_convert, "_convert", None)
    assert converted_folder(file, cache_dir=tmp_path / "cache") == folder


def test_another_file_is_another_conversion(tmp_path, tiny_gguf, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM)
    first = converted_folder(file)
    assert first.is_relative_to(tmp_path / "cache")
    copy = tmp_path / "copy" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    assert converted_folder(copy) == first
    other = bytearray(file.read_bytes())
    other[-1] ^= 1
    copy.write_bytes(other)
    assert converted_folder(copy) != first
    monkeypatch.setattr(gguf_convert, "_VERSION", 0)
    assert converted_folder(file) not in (first, None)


def test_processes_that_convert_at_once_share_one_result(tmp_path, tiny_gguf):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=spawn) as pool:
        runs = [pool.submit(converted_folder, file, cache_dir=tmp_path) for _ in range(3)]
        assert len({run.result(timeout=60) for run in runs}) == 1
    assert len([path for path in (tmp_path / "models").iterdir() if path.is_dir()]) == 1


def test_who_comes_second_waits_and_converts_nothing(tmp_path, tiny_gguf, monkeypatch):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM)
    converted: list[Path] = []
    convert = gguf_convert._convert
    monkeypatch.setattr(
        gguf_convert, "_convert", lambda *paths: (converted.append(paths[1]), convert(*paths))
    )
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(converted_folder, file, cache_dir=tmp_path) for _ in range(4)]
        assert len({run.result(timeout=60) for run in runs}) == 1
    assert len(converted) == 1


def test_what_a_dead_process_left_is_not_taken_for_whole(tmp_path, tiny_gguf):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM)
    place = gguf_convert._place([file], tmp_path)
    unfinished = place.with_name(place.name + ".unfinished")
    unfinished.mkdir(parents=True)
    (unfinished / "stale.safetensors").write_text("half")
    folder = converted_folder(file, cache_dir=tmp_path)
    assert not unfinished.exists()
    assert not (folder / "stale.safetensors").exists()


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"no gguf at all, only some text", b"GGUF\3\0\0\0"]
)
def test_a_file_that_is_no_gguf(tmp_path, content):
    file = tmp_path / "wrong.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"wrong\.gguf cannot be read as a GGUF file"):
        converted_folder(file, cache_dir=tmp_path)


def test_a_file_cut_short(tmp_path, tiny_gguf):
    file = tiny_gguf.write(tmp_path / "short.gguf", NORM)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"short\.gguf cannot be read as a GGUF file"):
        converted_folder(file, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("Llama-3.2-1B-Instruct-IQ3_XS.gguf", "Llama-3.2-1B-Instruct"),
        ("Qwen3-0.6B-BF16.gguf", "Qwen3-0.6B"),
        ("tiny.gguf", "tiny"),
    ],
)
def test_the_name_leaves_out_the_quantization(file, name):
    assert model_name(Path(file)) == name


def numbers(model: ModelFolder) -> dict[str, np.ndarray]:
    read = read_tensors(model.weight_files, model.config)
    return {name: blocks.numbers().numpy() for name, blocks in read.items()}


@pytest.mark.parametrize("more", [{}, {"small_first_shard": True}])
def test_a_model_in_parts_is_the_model_in_one_file(tmp_path, tiny_gguf, more):
    rng = np.random.default_rng(0)
    names = [f"blk.{layer}.ffn_{part}.weight" for layer in range(2) for part in ("up", "gate")]
    tensors = {name: rng.standard_normal((96, 64)).astype(np.float32) for name in names} | NORM
    whole = resolve(str(tiny_gguf.write(tmp_path / "w.gguf", tensors)), cache_dir=tmp_path)
    (tmp_path / "parts").mkdir()
    tiny_gguf.write(tmp_path / "parts/My-Model-Q8_0.gguf", tensors, split_max_tensors=2, **more)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 3 + len(more)
    assert parts[0].name == f"My-Model-Q8_0-00001-of-0000{len(parts)}.gguf"
    models = [resolve(str(part), cache_dir=tmp_path) for part in parts]
    assert models == models[:1] * len(parts)  # any part names the model
    assert (models[0].name, models[0].weight_files) == ("My-Model", tuple(parts))
    assert models[0].num_weights == whole.num_weights
    assert models[0].config == whole.config
    assert read_shape(str(parts[1])) == read_shape(str(parts[0]))
    assert resolve(str(models[0].path)) == models[0]
    wanted = numbers(whole)
    found = numbers(models[0])
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_parts_that_are_missing_or_are_of_another_model_are_named(tmp_path, tiny_gguf):
    names = [f"blk.{layer}.ffn_up.weight" for layer in range(4)]
    tensors = {name: np.ones((96, 64), np.float32) for name in names}
    keys = {"block_count": 4}
    tiny_gguf.write(tmp_path / "m.gguf", tensors, keys=keys, split_max_tensors=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    contents = [part.read_bytes() for part in parts]

    def refused(file: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as raised:
            resolve(str(file), cache_dir=tmp_path)
        assert len(raised.value.message.splitlines()) == 1

    parts[1].unlink()
    parts[3].unlink()
    for part in (parts[0], parts[2]):
        refused(part, "one of 4 parts .* lacks m-00002-of-00004.gguf, m-00004-of-00004.gguf$")
    parts[1].write_bytes(contents[2])
    parts[3].write_bytes(contents[3])
    refused(parts[0], r"m-00002-of-00004\.gguf: split\.no is 2; it must be 1. The")
    parts[1].write_bytes(contents[1][:-1])
    refused(parts[0], r"m-00002-of-00004\.gguf cannot be read as a GGUF file")
    (tmp_path / "renamed.gguf").write_bytes(contents[0])
    refused(tmp_path / "renamed.gguf", "the file is one of 4 files of a model. Join")
    (tmp_path / "m-00005-of-00004.gguf").write_bytes(contents[0])
    refused(tmp_path / "m-00005-of-00004.gguf", "the part number 00005 in its name")
    for part, content in zip(parts, contents, strict=True):
        part.write_bytes(content)
    at = contents[0].index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(contents[0][:at] + b"\x05" + contents[0][at + 1 :])
    refused(parts[0], "split.tensors.count is 5, but the 4 parts have 4 tensors together")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        (
            {"tokenizer.ggml.merges": ["Ġ t", "ab"]},
            "entry 1 of tokenizer.ggml.merges is 'ab'; it must be two",
        ),
        ({"tokenizer.ggml.merges": ["Ġ xyz"]}, "entry 0 of .*merges is 'Ġ xyz'; it must be two"),
        ({"tokenizer.ggml.merges": 5}, "merges is 5; it must be a list of texts"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens, the list"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokens is \[1, 2\]; it must be a list of texts"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has 2 items; it must have one for"),
        ({"tokenizer.ggml.token_type": "x"}, "token_type is 'x'; it must be a list of integers"),
        ({"tokenizer.ggml.eos_token_id": 263}, "eos_token_id is 263; it must be a token id"),
        ({"tokenizer.ggml.eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295; it must be a"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token"),
        ({"tokenizer.ggml.eot_token_id": 999}, "eot_token_id is 999; it must be a token id"),
        ({"tokenizer.ggml.bos_token_id": 1.5}, "bos_token_id is 1.5; it must be a token id"),
        ({"tokenizer.ggml.model": ["gpt2"]}, r"ggml.model is \['gpt2'\]; it must be a text"),
        ({"tokenizer.ggml.pre": 3}, "tokenizer.ggml.pre is 3; it must be a text"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1; it must be true or false"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is 7; it must be a text"),
        ({"general.architecture": 7}, "general.architecture is 7; it must be a text"),
        ({"llama.block_count": "2"}, "llama.block_count is '2'; it must be a positive integer"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.rope.freq_base": True}, "llama.rope.freq_base is True; it must be a number"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0; it must be a positive"),
        ({"llama.embedding_length": [64, 65]}, "embedding_length differs from layer to layer"),
        ({"llama.vocab_size": "x"}, ""),
    ],
)
def test_a_key_that_is_missing_or_mistyped_is_named(tmp_path, tiny_gguf, more, says):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", NORM, further=more)
    if not says:  # a key that nothing is read from
        resolve(str(file), cache_dir=tmp_path)
        return
    with pytest.raises(ConfigError, match=says) as raised:
        resolve(str(file), cache_dir=tmp_path)
    assert raised.value.message.startswith(f"{file}: ")
    assert "Error:" not in raised.value.message
    assert len(raised.value.message.splitlines()) == 1


def test_a_large_vocabulary_is_converted_in_little_memory(tmp_path):
    """A quarter of Gemma 3's. The gguf package alone would take 250 MB and 2.5 CPU seconds."""
    num_tokens = 65_536
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    for key, value in {"context_length": 64, "embedding_length": 64, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "</s>", *(f"<{i:x}>" for i in range(num_tokens - 2))])
    writer.add_token_scores([float(-i) for i in range(num_tokens)])
    writer.add_token_types([2, 3] + [1] * (num_tokens - 2))
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    code = (
        "import sys; from resource import RUSAGE_SELF, getrusage; from pathlib import Path;"
        "from tandem.models.source import resolve; import gguf, tokenizers;"
        "before = getrusage(RUSAGE_SELF).ru_maxrss;"
        "model = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]));"
        "print(model.config.vocab_size, getrusage(RUSAGE_SELF).ru_maxrss - before)"
    )
    arguments = [sys.executable, "-c", code, tmp_path / "large.gguf", tmp_path]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    vocab_size, grown_kib = map(int, run.stdout.split())
    assert vocab_size == num_tokens
    assert grown_kib < 125 << 10
