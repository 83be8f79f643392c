import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import ConfigError
from tandem.models.gguf import convert as gguf_convert
from tandem.models.gguf.convert import converted_folder, model_name

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
