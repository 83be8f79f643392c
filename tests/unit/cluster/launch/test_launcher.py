"""`tandem up` refuses what is wrong before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.gpu_check import Cards
from tandem.cluster.launch import launcher
from tandem.cluster.launch.launcher import up
from tandem.cluster.launch.options import LaunchOptions
from tandem.common import cuda_build
from tandem.common.config.admin import AdminOptions
from tandem.common.config.engine import EngineOptions
from tandem.errors import ConfigError
from tests.harness.cluster import free_port


def options(**more: Any) -> LaunchOptions:
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    admin = AdminOptions(port=free_port(), grpc_port=free_port())
    return LaunchOptions(**ports, admin=admin, **more)


def test_an_address_of_another_machine_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        up(options(listen="192.0.2.1"))


def test_a_taken_port_to_join_at_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 .* --cluster-port"):
            up(options(listen="127.0.0.1", cluster_port=port))


def test_a_token_file_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    with pytest.raises(ConfigError, match="token must have at least 16"):
        up(
            options(
                listen="127.0.0.1",
                cluster_port=free_port(),
                join_token_file=str(tmp_path / "token"),
            )
        )


@pytest.mark.parametrize(
    ("more", "num_gpus", "cards", "why"),
    [
        ({}, 0, Cards(), "no GPU was found on this machine"),
        ({}, 1, Cards(fault="CUDA does not start: no (error 3)"), "CUDA does not start: no"),
        ({"num_decode": 3}, 1, Cards((80 << 30,)), "4 workers do not fit on 1 GPU"),
        ({"num_decode": 2}, 2, Cards((80 << 30, 80 << 30)), "--workers-per-gpu 2"),
        ({}, 1, Cards((9_000_000,)), "each of 2 workers may use 4,050,000 of a GPU's 9,000,000"),
    ],
)
def test_gpus_that_do_not_suffice_are_wrong_options_in_one_line(
    more: dict[str, Any],
    num_gpus: int,
    cards: Cards,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "count_gpus", lambda _: num_gpus)
    monkeypatch.setattr(launcher, "read_cards", lambda: cards)
    monkeypatch.setattr(launcher, "read_driver", lambda: None)
    monkeypatch.setattr(cuda_build, "installed_version", lambda _: "")
    monkeypatch.setattr(launcher, "_Launch", None)  # nothing is started
    engine = EngineOptions(device="cuda")
    assert up(options(engine=engine, **more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: ")
    assert why in line


def test_workers_that_choose_their_device_use_cpus_beside_a_gpu_that_pytorch_cannot_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "count_gpus", lambda _: 1)
    monkeypatch.setattr(launcher, "read_cards", lambda: pytest.fail("the GPU is not used"))
    monkeypatch.setattr(cuda_build, "installed_version", lambda _: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"--kv-memory 900000000000000: 2 workers need"):
        up(options(engine=EngineOptions(kv_bytes_max=900_000_000_000_000)))
