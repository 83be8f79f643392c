"""What the driver's library says of the GPUs, from a stand-in for libcuda."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.gpu_check import Cards, Driver, read_cards, read_driver


def library(*sizes: int, code: int = 0, text: bytes | None = b"no device") -> Any:
    """Returns libcuda with GPUs of these sizes, 0 for one that does not answer. `cuInit` returns
    `code`."""

    def name_error(_: int, place: Any) -> None:
        place._obj.value = text

    def count(place: Any) -> None:
        place._obj.value = len(sizes)

    def get(place: Any, index: int) -> int:
        place._obj.value = 40 + index
        return 0

    def total(place: Any, device: ctypes.c_int) -> int:
        place._obj.value = sizes[device.value - 40]
        return int(not place._obj.value)

    return SimpleNamespace(
        cuInit=lambda flags: code + flags,
        cuGetErrorString=name_error,
        cuDeviceGetCount=count,
        cuDeviceGet=get,
        cuDeviceTotalMem_v2=total,
    )


def test_the_memory_of_each_gpu() -> None:
    assert read_cards(library(80 << 30, 24 << 30)) == Cards((80 << 30, 24 << 30))


def test_no_memory_is_known_if_one_gpu_does_not_answer() -> None:
    assert read_cards(library(80 << 30, 0)) == Cards()


@pytest.mark.parametrize(("text", "why"), [(b"no device", "no device"), (None, "unknown error")])
def test_cuda_that_does_not_start(text: bytes | None, why: str) -> None:
    cards = read_cards(library(code=100, text=text))
    assert cards == Cards(fault=f"CUDA does not start: {why} (error 100)")


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        assert name == "libcuda.so.1"
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert read_cards() == Cards()


def test_the_version_of_the_driver(tmp_path: Path) -> None:
    assert read_driver(tmp_path) is None
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19")
    assert read_driver(tmp_path) == Driver(535, "129.03")
    assert str(Driver(535, "129.03")) == "535.129.03"
