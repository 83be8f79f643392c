"""The environment in which UCX creates a backend, with a stand-in for NIXL's bindings."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.transfer.nixl import agent
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
    monkeypatch.setattr(agent, "load_nixl", lambda: SimpleNamespace(nixlBind=bindings))
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
