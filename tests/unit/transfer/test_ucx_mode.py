from __future__ import annotations

import os

import pytest

from tandem.transfer.nixl.ucx_mode import UcxMode, transports, ucx_environment


@pytest.mark.parametrize("asked", ["all", "tcp", "^cma", "tcp,rc", "rc_mlx5,ud", ""])
@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
@pytest.mark.parametrize("mode", [UcxMode.MEMORY, UcxMode.RDMA])
def test_tcp_is_in_no_mode_but_its_own(mode: UcxMode, memory: str, asked: str) -> None:
    named = transports(mode, memory, {"UCX_TLS": asked}).split(",")
    assert named
    assert "" not in named
    assert not {"tcp", "all"} & set(named)
    assert not any(name.startswith("^") for name in named), "an exclusion leaves TCP in"


def test_an_operators_choice_of_rdma_transports_is_kept() -> None:
    assert transports(UcxMode.RDMA, "DRAM", {"UCX_TLS": "rc_mlx5,tcp,ud"}) == "rc_mlx5,ud"
    assert transports(UcxMode.RDMA, "VRAM", {}) == "ib,cuda_copy,cuda_ipc"
    assert transports(UcxMode.TCP, "DRAM", {"UCX_TLS": "tcp"}) == "tcp"
    assert transports(UcxMode.TCP, "DRAM", {}) == "all"


@pytest.mark.parametrize(
    ("mode", "asked", "named"),
    [
        (UcxMode.MEMORY, "all", "posix,sysv,cma,self,cuda_copy"),
        (UcxMode.RDMA, "all", "ib,cuda_copy"),
        (UcxMode.RDMA, "rc_mlx5,cuda_ipc", "rc_mlx5"),
        (UcxMode.TCP, "all", "^cuda_ipc"),
        (UcxMode.TCP, "^ib", "^ib,cuda_ipc"),
        (UcxMode.TCP, "^cuda_ipc", "^cuda_ipc"),
        (UcxMode.TCP, "tcp,cuda_copy,cuda_ipc", "tcp,cuda_copy"),
    ],
)
def test_ucx_does_not_map_the_gpus_that_this_process_maps(
    mode: UcxMode, asked: str, named: str
) -> None:
    assert transports(mode, "VRAM", {"UCX_TLS": asked}, with_cuda_ipc=False) == named


@pytest.mark.parametrize("before", [None, "tcp"])
def test_the_environment_is_as_it_was_afterwards(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", before)
    with ucx_environment({"UCX_TLS": "cma"}):
        assert os.environ["UCX_TLS"] == "cma"
    assert os.environ.get("UCX_TLS") == before
