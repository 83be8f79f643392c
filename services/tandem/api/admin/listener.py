"""The admin listener of a router: the operators' HTTP and gRPC ports."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import grpc
from starlette.types import ASGIApp

from tandem.api.grpc.cluster import SERVICE
from tandem.api.grpc.server import Address, GrpcServer
from tandem.api.http.server import HttpServer, bind
from tandem.common.config.router import RouterConfig
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security.access import is_loopback
from tandem.net.security.clients import Clients

# The admin ports have a connection limit of their own. Clients of the public ports cannot use up
# these connections.
_CONNECTIONS_MAX = 128
_DRAIN_DEADLINE_S = 1.0


class AdminListener:
    """Serves the admin ports. The caller calls `bind`, then `start`, and calls `stop` once the
    public ports have stopped."""

    def __init__(
        self,
        config: RouterConfig,
        cluster: grpc.GenericRpcHandler[Any, Any],
        clients: Clients,
        files: CertificateFiles | None = None,
    ) -> None:
        """Prepares the ports without binding them. `files` are TLS certificates. If the ports
        listen on loopback, `files` is ignored and the ports use no TLS."""
        self._config = replace(
            config, connections_max=_CONNECTIONS_MAX, drain_deadline_s=_DRAIN_DEADLINE_S
        )
        self._clients = clients
        self._files = None if is_loopback(config.admin.host) else files
        self._sock: socket.socket | None = None
        self._http: HttpServer | None = None
        admin = config.admin
        self.grpc = GrpcServer(
            self._config,
            {SERVICE: cluster},
            Address(admin.host, admin.grpc_port, "--admin-grpc-port"),
            clients,
            self._files,
        )
        self.http_port = 0
        self.grpc_port = 0

    def bind(self) -> None:
        """Binds both ports. Raises ConfigError if a port is in use."""
        admin = self._config.admin
        self._sock = bind(
            admin.host,
            admin.port,
            port_option="--admin-port",
            send_deadline_s=self._config.send_deadline_s,
        )
        self.http_port = self._sock.getsockname()[1]
        self.grpc_port = self.grpc.bind()

    async def start(self, app: ASGIApp) -> asyncio.Task[None]:
        """Starts the gRPC server and serves `app` over HTTP. Returns the task of the HTTP
        server."""
        assert self._sock is not None
        await self.grpc.start()
        self._http = HttpServer(app, self._config, self._clients, self._files)
        return asyncio.create_task(self._http.serve(sockets=[self._sock]), name="admin-http")

    async def stop(self, serving: asyncio.Task[None]) -> None:
        if self._http is not None:
            self._http.begin_stop()
        await asyncio.gather(self.grpc.stop(_DRAIN_DEADLINE_S), serving, return_exceptions=True)
