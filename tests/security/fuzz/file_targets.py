"""Targets that are files of a model: GGUF, and folders with safetensors, JSON and a tokenizer."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
from hypothesis import strategies as st

from tests.unit.models import test_malformed_files as files


class BrokenFiles:
    """Files that `tests/unit/models/test_malformed_files.py` breaks, as chance has it."""

    def __init__(self, name: str, fuzz: Callable[..., int], whole: object, folder: Path) -> None:
        self.name = name
        self.inputs = st.integers(0, 1 << 62).map(random.Random)
        self._fuzz = fuzz
        self._whole = whole
        self._folder = folder

    def rss_bytes(self) -> int:
        return int(psutil.Process(os.getpid()).memory_info().rss)

    def check(self, value: random.Random) -> None:
        self._fuzz(self._whole, self._folder, 1, value)


def file_targets(folder: Path) -> list[BrokenFiles]:
    """Returns a target for GGUF files and one for model folders; both work in this folder."""
    from tests.unit.models.conftest import TOKENS, gguf_tensors, write_gguf

    folder.mkdir(exist_ok=True)
    path = folder / "tiny.gguf"
    tensors = gguf_tensors(files.tiny_llama(len(TOKENS)))
    whole = write_gguf(path, tensors).read_bytes()
    model = shutil.copytree(
        files.resolve(str(path), cache_dir=folder / "whole").path, folder / "model"
    )
    return [
        BrokenFiles("gguf", files.fuzz_gguf, whole, folder),
        BrokenFiles("model-folder", files.fuzz_folder, model, folder),
    ]
