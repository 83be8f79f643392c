"""Targets that read the files of a model: GGUF, safetensors, and complete folders."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from hypothesis import strategies as st

from tandem.engine.executor.weights.load import load_weights
from tandem.errors import ConfigError
from tandem.models.folder import ModelFolder
from tandem.models.gguf.export import export
from tandem.models.gguf.layout import read_layout
from tandem.models.source import resolve
from tests.security.fuzz.parser_targets import ParserTarget
from tests.unit.models import test_malformed_files as files


class _Chance:
    """Inputs that are numbers; a target derives the damage of a file from the number."""

    seeds = st.just(0)

    def input_of(self, seeds: Sequence[int], chance: random.Random) -> int:
        return chance.getrandbits(62)


class _BrokenBytes:
    """A file in a folder that is damaged and then read."""

    def __init__(self, whole: Path, folder: Path, read: Callable[[Path], object]) -> None:
        self.source = _Chance()
        self._whole = whole.read_bytes()
        self._file = folder / f"broken{whole.suffix}"
        self._read = read

    def check(self, value: int) -> None:
        self._file.write_bytes(files.mutated(self._whole, random.Random(value)))
        with suppress(ConfigError):
            self._read(self._file)


class _BrokenModel:
    """A model that `tests/unit/models/test_malformed_files.py` damages, and loads like a worker."""

    def __init__(self, fuzz: Callable[..., int], whole: object, folder: Path) -> None:
        self.source = _Chance()
        self._fuzz = fuzz
        self._whole = whole
        self._folder = folder

    def check(self, value: int) -> None:
        self._fuzz(self._whole, self._folder, 1, random.Random(value))


def write_tiny_model(folder: Path) -> ModelFolder:
    """Writes a GGUF file and a folder with the same weights and a chat template. The model has two
    layers of random weights."""
    from tests.unit.models.conftest import TOKENS, gguf_tensors, write_gguf

    tensors = gguf_tensors(files.tiny_llama(len(TOKENS)))
    path = write_gguf(folder / "tiny.gguf", tensors)
    whole = export(resolve(str(path), cache_dir=folder / "cache"), folder / "whole")
    files.set_chat_template(whole)
    return resolve(str(whole))


def file_targets(folder: Path) -> dict[str, ParserTarget]:
    """Creates targets that use this folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = write_tiny_model(folder)
    copy = shutil.copytree(model.path, folder / "model")

    def read_weights(file: Path) -> None:
        load_weights([file], model.config, dtype=torch.float32, device=torch.device("cpu"))

    gguf = folder / "tiny.gguf"
    return {
        "gguf-layout": _BrokenBytes(gguf, folder, read_layout),
        "safetensors": _BrokenBytes(model.weight_files[0], folder, read_weights),
        "gguf": _BrokenModel(files.fuzz_gguf, gguf.read_bytes(), folder),
        "model-folder": _BrokenModel(files.fuzz_folder, copy, folder),
    }
