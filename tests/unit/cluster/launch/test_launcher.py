"""`tandem up` refuses what is wrong before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.launch.launcher import up
from tandem.cluster.launch.options import LaunchOptions
from tandem.common.config.admin import AdminOptions
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
