"""The public listener of a router: the ports for clients.

--api   HTTP port                                     gRPC port
http    the HTTP API                                  none
grpc    only probes and calls from other routers      the gRPC API
both    the HTTP API                                  the gRPC API
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Collection
from typing import Any

import grpc
from starlette.types import ASGIApp

from tandem.api.grpc.connections import Peer
from tandem.api.grpc.inference import SERVICE
from tandem.api.grpc.server import Address, GrpcServer
from tandem.api.http.server import HttpServer, bind
from tandem.common.config.router import RouterConfig
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security.clients import Clients
from tandem.net.store.url import parse

log = logging.getLogger(__name__)


class PublicListener:
    """Serves the public ports. The caller calls `bind`, then `start` and `serve`, and at the end
    `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        inference: grpc.GenericRpcHandler[Any, Any],
        clients: Clients,
        live: Collection[Peer],
        files: CertificateFiles | None = None,
    ) -> None:
        """Prepares both ports. With `files` (certificates) the ports use TLS. `live` has the gRPC
        clients with an authorized call."""
        self._config = config
        self._clients = clients
        self._files = files
        self._live = live
        self._sock: socket.socket | None = None
        self._http: HttpServer | None = None
        self.grpc: GrpcServer | None = None
        if config.api != "http":
            self.grpc = GrpcServer(
                config,
                {SERVICE: inference},
                Address(config.host, config.grpc_port, "--grpc-port"),
                clients,
                files,
            )
        self.http_port = 0
        self.grpc_port = 0

    def not_ready_reason(self) -> str:
        """Returns "", because this listener can always serve. A PickerListener may return a
        reason."""
        return ""

    @property
    def endpoint(self) -> str:
        """HOST:PORT at which other processes reach the HTTP API."""
        return f"{_own_host(self._config)}:{self.http_port}"

    @property
    def own_url(self) -> str:
        """Base URL at which other routers reach this router."""
        return f"{'http' if self._files is None else 'https'}://{self.endpoint}"

    def bind(self) -> None:
        """Binds both ports. Raises ConfigError if a port is in use."""
        config = self._config
        self._sock = bind(
            config.host,
            config.http_port,
            port_option="--http-port",
            send_deadline_s=config.send_deadline_s,
        )
        self.http_port = self._sock.getsockname()[1]
        if self.grpc is not None:
            self.grpc_port = self.grpc.bind()

    async def start(self) -> None:
        """Starts the gRPC server, if there is one."""
        if self.grpc is not None:
            await self.grpc.start()

    def serve(self, app: ASGIApp) -> asyncio.Task[None]:
        """Serves `app` over HTTP. Returns the task of the HTTP server."""
        assert self._sock is not None
        self._http = HttpServer(app, self._config, self._clients, self._files)
        host = self._config.host
        ports = f"HTTP {host}:{self.http_port}" + (
            f", gRPC {host}:{self.grpc_port}" if self.grpc else ""
        )
        log.info("listening: %s", ports)
        return asyncio.create_task(self._http.serve(sockets=[self._sock]), name="public")

    async def stop(
        self, deadline_s: float, serving: asyncio.Task[None], *, cuts_idle: bool = False
    ) -> None:
        """Refuses new requests, and waits at most `deadline_s` seconds until open requests end.
        `cuts_idle`: True if gRPC connections without an authorized call are closed meanwhile."""
        if self._http is not None:
            self._http.begin_stop()
        ends: list[Awaitable[None]] = [serving]
        if self.grpc is not None and cuts_idle:
            ends.append(self.grpc.stop_and_cut(deadline_s, self._live))
        elif self.grpc is not None:
            ends.append(self.grpc.stop(deadline_s))
        await asyncio.gather(*ends, return_exceptions=True)


def _own_host(config: RouterConfig) -> str:
    """Returns the host for URLs that other routers use to reach this router. If the router listens
    on all addresses, this is the local address from which the machine reaches Redis."""
    host = config.host
    if host in ("0.0.0.0", "::"):
        nodes = parse(config.cluster.redis_url).nodes or (("127.0.0.1", 1),)
        family, _, _, _, address = socket.getaddrinfo(*nodes[0], type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # On a UDP socket, `connect` sends nothing: it only selects the local address.
            probe.connect(address)
            host = probe.getsockname()[0]
    return f"[{host}]" if ":" in host else host
