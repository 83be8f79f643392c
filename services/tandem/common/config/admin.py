"""Settings of a router's admin listener."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from tandem.common.config.groups import PROCESS
from tandem.common.options import Options, Port, option_name


def _admin_name(field_name: str) -> str:
    return f"admin-{option_name(field_name)}"


@Parameter(name="*", group=PROCESS, name_transform=_admin_name)
@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions(Options):
    """The ports of operators and Prometheus. A router's public ports answer none of their calls."""

    host: str = "127.0.0.1"
    """Address at which a router listens on --admin-port and --admin-grpc-port. At addresses other
    than 127.0.0.1 and ::1, calls need an API key."""
    port: Port = 8002
    """Port of the live page, the metrics and the HTTP API for operators."""
    grpc_port: Port = 8003
    """Port of the gRPC API for operators."""
