"""The program that compiles the CPU kernels, and kernels that were built for another processor."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor import kernel_choice
from tandem.errors import ConfigError
from tandem.models.source import resolve
from tandem_kernels.native import library
from tests.harness.wheel import ROOT

MODEL = resolve("smollm2").config


@pytest.fixture(scope="module")
def native_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "kernels/native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counting_compiler(folder: Path) -> Path:
    """A compiler that writes empty objects, and a line into `folder`/log for each."""
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do [ "$1" = --version ] && exit; shift; done\n'
        f'echo "$2" >> {folder}/log\ntouch "$2"\n'
    )
    compiler.chmod(0o755)
    return compiler


def test_an_object_is_compiled_once(
    native_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native_build.compile_objects(["avx2"])
    num_compiled = len((tmp_path / "log").read_text().splitlines())
    assert num_compiled == len(first)
    assert native_build.compile_objects(["avx2"]) == first
    assert len((tmp_path / "log").read_text().splitlines()) == num_compiled
    # The functions that choose a set are compiled again, and so is the set that is new.
    native_build.compile_objects(["avx2", "plain"])
    assert len((tmp_path / "log").read_text().splitlines()) == num_compiled + 3


def test_without_a_compiler_the_message_says_what_to_install(
    native_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(native_build.BuildError, match=r"apt install g\+\+"):
        native_build.wanted_sets(all_by_default=False)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(native_build.BuildError, match=r"/nowhere/c\+\+ cannot be run: No such"):
        native_build.compile_objects(["plain"])


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(
    native_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    objects = native_build.compile_objects(["plain"])
    assert all(path.exists() for path in objects)


def test_the_variable_names_instruction_sets(
    native_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_NATIVE", "avx2,plain")
    assert native_build.wanted_sets(all_by_default=True) == ("avx2", "plain")
    monkeypatch.setenv("TANDEM_NATIVE", "all")
    assert native_build.wanted_sets(all_by_default=False) == native_build.INSTRUCTION_SETS
    monkeypatch.setenv("TANDEM_NATIVE", "sse9")
    with pytest.raises(native_build.BuildError, match="names 'sse9'; allowed are all, amx, "):
        native_build.wanted_sets(all_by_default=True)


def test_kernels_of_another_processor_are_refused_with_what_to_do(
    native_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library.load()
    assert found is not None
    best = found.best_instructions
    if best == "plain":
        pytest.skip("this processor has no better instruction set than plain")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # `make test` has compiled the objects
    built = tmp_path / "_decoder.so"
    native_build.build(built, ["plain"])
    assert native_build.best_set() == best
    old = library.Library(built)
    assert (old.instructions(), old.instructions(best)) == ("plain", None)
    monkeypatch.setattr(library, "load", lambda: old)
    with pytest.raises(ConfigError, match=f"they lack {best}, .* Run `make` in the repository"):
        kernel_choice.choose_kernels(EngineConfig(model="m"), torch.device("cpu"), MODEL)
    monkeypatch.setattr(library, "load", lambda: None)
    with pytest.raises(ConfigError, match="the CPU kernels are not built"):
        kernel_choice.choose_kernels(EngineConfig(model="m"), torch.device("cpu"), MODEL)
