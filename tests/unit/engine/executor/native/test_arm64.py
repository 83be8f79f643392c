"""The kernels of arm64 compute the same bits as those of AVX2, shown in an emulator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_kernels.native import library
from tests.harness.wheel import ROOT

COMPILER = "aarch64-linux-gnu-g++"
PROGRAM = ROOT / "tests/harness/native_bits.cpp"
FLAGS = ("-std=c++17", "-O1", "-fopenmp", "-Wno-psabi")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bits_are_those_of_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("g++", COMPILER, "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    own = library.load()
    if own is None or own.instructions("avx2") is None:
        pytest.skip("this processor or this build lacks avx2")
    built = next(Path(library.__file__).parent.glob("_decoder*.so"))
    ours, theirs = tmp_path / "avx2", tmp_path / "neon"
    run("g++", *FLAGS, str(PROGRAM), str(built), f"-Wl,-rpath,{built.parent}", "-o", str(ours))

    monkeypatch.setenv("CXX", COMPILER)
    monkeypatch.syspath_prepend(str(ROOT / "kernels"))
    monkeypatch.delitem(sys.modules, "native_build", raising=False)
    import native_build

    objects = map(str, native_build.compile_objects(["neon"]))
    run(COMPILER, *FLAGS, "-static", str(PROGRAM), *objects, "-o", str(theirs))

    expected = run(str(ours), "avx2")
    assert len(expected.splitlines()) == 4
    assert run("qemu-aarch64", str(theirs), "neon") == expected


def run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
