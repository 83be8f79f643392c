"""Model files that are broken, by chance or on purpose, end in a ConfigError that names the file.

The short form runs in CI. FUZZ_FILES and FUZZ_SEED choose how many files of each kind the long form
makes, and which: `pytest -m slow tests/unit/models/test_malformed_files.py`.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.executor.weights.load import load_weights
from tandem.errors import ConfigError, TandemError
from tandem.models.checkpoint.check import check_weights
from tandem.models.gguf.export import export
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer

NUM_FILES_SHORT = 150
NUM_FILES_LONG = int(os.environ.get("FUZZ_FILES", "5000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
LOAD_S_MAX = 10
GROWTH_BYTES_MAX = 512 << 20

ABSURD = [0, 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
ABSURD_JSON = [
    *(None, True, "", "x", "\x00", -1, 0, 1.5, 10**30, float("inf"), float("nan")),
    *([], {}, [[]], [None], {"": None}, ["x"] * 3, {"x": {"x": 1}}, "1e999", "../../etc/passwd"),
]


def load(model: Path, cache: Path) -> None:
    """Does with a model's files what a router and a worker do."""
    folder = resolve(str(model), cache_dir=cache)
    tokenizer = Tokenizer(folder.path)
    tokenizer.encode("Hello the world")
    weights = load_weights(
        folder.weight_files, folder.config, dtype=torch.float32, device=torch.device("cpu")
    )
    assert len(list(weights.layers)) == folder.config.num_layers


@contextmanager
def bounded() -> Iterator[None]:
    """Fails what takes longer or more memory than a broken file of a few KiB may."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done within {LOAD_S_MAX} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(LOAD_S_MAX)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GROWTH_BYTES_MAX


def assert_refused_or_whole(model: Path, cache: Path) -> bool:
    """Loads the model; returns whether it was refused. Anything but a ConfigError is a failure."""
    try:
        with bounded():
            load(model, cache)
        return False
    except ConfigError as error:
        message = error.message
    assert str(model) in message or str(cache) in message  # what it became
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    return True


def mutated(whole: bytes, chance: random.Random) -> bytes:
    """Returns the bytes with a few flipped, cut off, doubled, or replaced by absurd numbers."""
    data = bytearray(whole)
    kind = chance.randrange(5)
    # Most damage goes to the front, where the metadata are.
    front = min(len(data), 8192) if chance.random() < 0.5 else len(data)
    if kind == 0:
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(front)] = chance.randrange(256)
    elif kind == 1:
        del data[chance.randrange(front) :]
    elif kind == 2:
        for _ in range(chance.randint(1, 3)):
            number = struct.pack("<Q", chance.choice(ABSURD))[: chance.choice((4, 8))]
            at = chance.randrange(front)
            data[at : at + len(number)] = number
    elif kind == 3:
        start, end = sorted(chance.randrange(front) for _ in range(2))
        data[start:start] = data[start:end]
    else:
        start, end = sorted(chance.randrange(front) for _ in range(2))
        del data[start:end]
    return bytes(data)


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, **heads))


def set_chat_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from tests.unit.models.conftest import TOKENS, gguf_tensors, write_gguf

    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    return write_gguf(path, gguf_tensors(tiny_llama(len(TOKENS))), keys=keys).read_bytes()


@pytest.fixture(scope="module")
def whole_folder(whole_gguf: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    (path / "tiny.gguf").write_bytes(whole_gguf)
    folder = export(resolve(str(path / "tiny.gguf"), cache_dir=path / "cache"), path / "whole")
    set_chat_template(folder)
    return folder


@pytest.fixture(scope="module", params=["tiktoken.model", "tekken.json"])
def ranked_folder(
    request: pytest.FixtureRequest, whole_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder, with its tokenizer in another form."""
    folder = tmp_path_factory.mktemp("ranked") / "whole"
    shutil.copytree(whole_folder, folder)
    (folder / "tokenizer.json").unlink()
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the"]
    coded = [base64.b64encode(token).decode() for token in tokens]
    vocab = [{"rank": rank, "token_bytes": token} for rank, token in enumerate(coded)]
    sizes = {"default_vocab_size": 263, "default_num_special_tokens": 5}
    whole: dict[str, object] = {"vocab": vocab, "config": {"pattern": r"\s+|\S+", **sizes}}
    lines = "".join(f"{token} {rank}\n" for rank, token in enumerate(coded))
    text = lines if request.param == "tiktoken.model" else json.dumps(whole)
    (folder / request.param).write_text(text)
    return folder


def fuzz_gguf(
    whole: bytes, tmp_path: Path, num_files: int, chance: random.Random | None = None
) -> int:
    chance = chance or random.Random(SEED)
    num_refused = 0
    for number in range(num_files):
        file = tmp_path / f"broken-{number}.gguf"
        file.write_bytes(mutated(whole, chance))
        num_refused += assert_refused_or_whole(file, tmp_path / "cache")
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        file.unlink()
    return num_refused


def fuzz_folder(
    whole: Path, tmp_path: Path, num_files: int, chance: random.Random | None = None
) -> int:
    chance = chance or random.Random(SEED)
    names = [file.name for file in sorted(whole.iterdir())]
    num_refused = 0
    for number in range(num_files):
        folder = tmp_path / f"broken-{number}"
        shutil.copytree(whole, folder)
        broken = folder / chance.choice(names)
        if broken.suffix == ".json" and chance.random() < 0.7:
            broken.write_text(json.dumps(absurd_json(json.loads(broken.read_text()), chance)))
        else:
            broken.write_bytes(mutated(broken.read_bytes(), chance))
        num_refused += assert_refused_or_whole(folder, tmp_path / "cache")
        shutil.rmtree(folder)
    return num_refused


def absurd_json(value: object, chance: random.Random) -> object:
    """Returns the value with one of its parts, however deep, replaced or left out."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: absurd_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], absurd_json(value[at], chance), *value[at + 1 :]]
    return chance.choice(ABSURD_JSON)


def test_the_whole_files_load(whole_gguf: bytes, whole_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(whole_gguf)
    load(file, tmp_path / "cache")
    load(whole_folder, tmp_path / "cache")


def test_a_gguf_file_whose_tensors_do_not_fit_is_named(tmp_path: Path) -> None:
    from tests.unit.models.conftest import TOKENS, gguf_tensors, write_gguf

    tensors = gguf_tensors(tiny_llama(len(TOKENS)))
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_k.weight"][:16]
    assert assert_refused_or_whole(write_gguf(tmp_path / "tiny.gguf", tensors), tmp_path / "cache")


def test_broken_gguf_files_are_refused(whole_gguf: bytes, tmp_path: Path) -> None:
    assert fuzz_gguf(whole_gguf, tmp_path, NUM_FILES_SHORT) > NUM_FILES_SHORT // 4


def test_broken_folders_are_refused(whole_folder: Path, tmp_path: Path) -> None:
    assert fuzz_folder(whole_folder, tmp_path, NUM_FILES_SHORT) > NUM_FILES_SHORT // 4


def test_broken_tokenizers_of_other_forms_are_refused(ranked_folder: Path, tmp_path: Path) -> None:
    load(ranked_folder, tmp_path / "cache")
    num_files = NUM_FILES_SHORT // 3
    assert fuzz_folder(ranked_folder, tmp_path, num_files) > num_files // 4


MISTYPED = (None, "x", 0, 1 << 31, -1.5, True, ["x"], [1, 2])
MISTYPED_JSON = (*MISTYPED, {"x": 1}, [{"name": "x"}])
SETTINGS_OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
OPTIONAL_FIELDS = (
    *("eos_token", "image_token", "added_tokens_decoder", "chat_template"),
    *("additional_special_tokens", "extra_special_tokens"),
)
PYTHON_ERROR = re.compile(r"\b\w*(Error|Exception)\b")


def assert_named(path: Path, cache: Path) -> None:
    """What is refused of a model is one line without the name of a Python error."""
    said = ""
    try:
        model = resolve(str(path), cache_dir=cache)
        Tokenizer.of(model)
        check_weights(model.weight_files, model.config)
    except TandemError as error:
        said = error.message
    assert len(said.splitlines()) < 2
    assert not PYTHON_ERROR.search(said), said


def test_each_key_of_a_gguf_file_that_is_mistyped_is_named(tmp_path: Path) -> None:
    from tests.unit.models.conftest import KEYS, write_gguf

    norm = {"output_norm.weight": np.ones(64, np.float32)}
    others = ("chat_template", "ggml.eot_token_id", "ggml.add_bos_token", "ggml.scores")
    for key in (*KEYS, *(f"tokenizer.{each}" for each in others), "split.count"):
        for value in MISTYPED:
            file = write_gguf(tmp_path / "m.gguf", norm, further={key: value})
            assert_named(file, tmp_path / "cache")
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_each_field_of_a_folder_that_is_mistyped_is_named(
    whole_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(whole_folder, folder)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in SETTINGS_OF_TOKENIZER[1:]:
        (folder / name).write_text("{}")
    for file in folder.glob("*.json"):
        if file.name != "tokenizer.json":
            content = file.read_text()
            optional = OPTIONAL_FIELDS if file.name in SETTINGS_OF_TOKENIZER else ()
            fields = dict.fromkeys(optional) | json.loads(content)
            for field in fields:
                for value in MISTYPED_JSON:
                    file.write_text(json.dumps(fields | {field: value}))
                    assert_named(folder, tmp_path / "cache")
            file.write_text(content)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_broken_tokenizers_of_other_forms_are_refused(
    ranked_folder: Path, tmp_path: Path
) -> None:
    num_refused = fuzz_folder(ranked_folder, tmp_path, NUM_FILES_LONG)
    print(f"\n{num_refused} of {NUM_FILES_LONG} broken folders were refused")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("fuzz", [fuzz_gguf, fuzz_folder])
def test_many_broken_files_are_refused(
    whole_gguf: bytes, whole_folder: Path, tmp_path: Path, fuzz: Callable[..., int]
) -> None:
    whole = whole_gguf if fuzz is fuzz_gguf else whole_folder
    num_refused = fuzz(whole, tmp_path, NUM_FILES_LONG)
    print(f"\n{fuzz.__name__}: {num_refused} of {NUM_FILES_LONG} broken files were refused")
