"""The environment in which UCX creates a backend, with a stand-in for NIXL's bindings."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.common import cuda_build
from tandem.transfer.nixl import agent, cuda_version
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.ucx_mode import UcxMode

GET = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
EMULATION = "UCX_PROTO_EMULATION_ENABLE"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the last `createBackend`."""
    seen: dict[str, str] = {}

    class Backends:
        def __init__(self, name: str, config: object) -> None:
            pass

        def createBackend(self, name: str, options: dict[str, str]) -> int:  # noqa: N802
            seen.clear()
            seen.update(os.environ)
            return 1

    bindings: Any = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace, nixlAgent=Backends, NIXL_THREAD_SYNC_NONE=0
    )
    nixl = SimpleNamespace(nixlBind=bindings, __name__="nixl_cu12._api")
    monkeypatch.setattr(agent, "load_nixl", lambda: nixl)
    agent._warn_of_other_cuda.cache_clear()
    for name in (GET, EMULATION, "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    return seen


def create(mode: UcxMode, memory: str) -> None:
    NixlAgent("a", mode=mode, progress_delay_us=None, memory=memory)


@pytest.mark.parametrize("mode", [UcxMode.MEMORY, UcxMode.RDMA])
def test_ucx_reads_a_gpus_memory_without_emulation_or_not_at_all(
    seen: dict[str, str], mode: UcxMode
) -> None:
    create(mode, "VRAM")
    assert (seen[GET], seen[EMULATION]) == ("on", "n")
    assert {"cuda_ipc", "cuda_copy"} <= set(seen["UCX_TLS"].split(","))
    assert not {GET, EMULATION, "UCX_TLS"} & set(os.environ), "the environment is as before"


def test_an_operators_settings_are_kept(
    seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GET, "auto")
    create(UcxMode.MEMORY, "VRAM")
    assert (seen[GET], seen[EMULATION]) == ("auto", "n")
    monkeypatch.setenv(EMULATION, "y")
    create(UcxMode.MEMORY, "VRAM")
    assert (seen[GET], seen[EMULATION]) == ("auto", "y")
    assert (os.environ[GET], os.environ[EMULATION]) == ("auto", "y")


@pytest.mark.parametrize(
    ("mode", "memory"),
    [*((mode, "DRAM") for mode in UcxMode), (UcxMode.TCP, "VRAM")],
)
def test_host_memory_and_tcp_are_read_with_ucxs_own_settings(
    seen: dict[str, str], mode: UcxMode, memory: str
) -> None:
    """UCX emulates every read over TCP."""
    create(mode, memory)
    assert seen["UCX_TLS"]
    assert not {GET, EMULATION} & set(seen)


def test_a_nixl_for_another_cuda_than_pytorchs_is_said_once_and_only_for_gpus(
    seen: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = {"torch": "2.13.0+cu130"}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: versions.get(name, ""))
    create(UcxMode.MEMORY, "DRAM")
    assert caplog.records == []
    for _ in range(2):  # the consumer's agent and the producer's
        create(UcxMode.MEMORY, "VRAM")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "NIXL is built for CUDA 12, and PyTorch for CUDA 13" in record.getMessage()
    assert "install nixl-cu13" in record.getMessage()


@pytest.mark.parametrize(
    ("torch", "runtime", "first", "differs"),
    [
        ("2.13.0+cu130", "", "nixl_cu13._api", {"nixl_cu12._api"}),
        ("2.13.0+cu126", "", "nixl_cu12._api", {"nixl_cu13._api"}),
        ("2.13.0", "13.0.96", "nixl_cu13._api", {"nixl_cu12._api"}),
        ("2.13.0+cpu", "", "nixl_cu12._api", set()),
        ("", "", "nixl_cu12._api", set()),
    ],
)
def test_the_nixl_for_pytorchs_cuda_is_tried_first(
    torch: str, runtime: str, first: str, differs: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": torch, "nvidia-cuda-runtime": runtime}
    monkeypatch.setattr(cuda_build, "installed_version", lambda name: versions.get(name, ""))
    modules = cuda_version.nixl_modules()
    assert modules[0] == first
    assert set(modules) == {"nixl_cu12._api", "nixl_cu13._api", "nixl._api"}
    assert {each for each in modules if cuda_version.why_cuda_differs(each)} == differs
