"""A gRPC server of a router. It adds connection limits, the health service and the reflection
service to the router's own services."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from tandem.api.grpc.connections import ConnectionShares, Peer
from tandem.common.config.router import RouterConfig
from tandem.errors import ConfigError
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.rpc.failures import FailureInterceptor, quiet_peer_faults
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.peer_calls import add_port
from tandem.net.security.clients import Clients

# maximum size of the metadata of one call in bytes, where each field counts 32 bytes more than its
# name and value (HTTP/2)
METADATA_BYTES_MAX = 16 << 10
# A connection without open calls is closed after this many seconds. gRPC clients reconnect by
# themselves.
IDLE_S = 300.0
# maximum number of concurrent calls on one connection; clients queue further calls
STREAMS_MAX = 1024
# a connection is closed after this many pings that came too soon after the previous ping
PING_STRIKES_MAX = 2
_CUT_INTERVAL_S = 0.1
# After this many seconds a connection accepts no new calls, and the client opens a new connection.
AGE_S = 1800.0


class Address(NamedTuple):
    """The address of a server, and the command line option that sets the port."""

    host: str
    port: int
    port_option: str


class HealthNames(NamedTuple):
    """Names for which the health service reports a status, in addition to the names of the gRPC
    services."""

    ready: tuple[str, ...] = ()  # SERVING only while the server accepts requests (`set_ready`)
    live: tuple[str, ...] = ()  # SERVING until the server stops


class GrpcServer:
    """A gRPC server on one port. The caller uses `bind`, then `start`. `set_ready` sets the health
    status, and `stop` waits for open calls."""

    def __init__(
        self,
        config: RouterConfig,
        services: Mapping[str, grpc.GenericRpcHandler[Any, Any]],
        address: Address,
        clients: Clients,
        files: CertificateFiles | None = None,
        probes: HealthNames = HealthNames(),
    ) -> None:
        """Prepares the server. `services` are the handlers by service name. With `files` the port
        uses TLS."""
        self._files = files
        self._address = address
        self._names = ("", *services, *probes.ready)
        self._live_names = probes.live
        quiet_peer_faults()
        self._server = grpc.aio.server(
            interceptors=[FailureInterceptor()],
            options=[
                *((k, v) for k, v in SERVER_OPTIONS if k != "grpc.max_receive_message_length"),
                # Limits of each connection. The HTTP server has some of these limits with the same
                # values.
                ("grpc.max_receive_message_length", config.body_bytes_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.server_handshake_timeout_ms", round(config.header_deadline_s * 1000)),
                ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
                ("grpc.max_allowed_incoming_connections", config.connections_max),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
                # A client that stops reading keeps a call open until the connection is closed,
                # which happens at the latest after AGE_S + request_deadline_s.
                ("grpc.max_connection_age_ms", round(AGE_S * 1000)),
                ("grpc.max_connection_age_grace_ms", round(config.request_deadline_s * 1000)),
            ],
        )
        self._shares = ConnectionShares(config.connections_per_address_max, clients)
        self._watching: asyncio.Task[None] | None = None
        self._port = 0
        self._health = HealthServicer()
        self._server.add_generic_rpc_handlers(tuple(services.values()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self) -> int:
        """Binds the port and returns its number. Raises ConfigError if the port is in use."""
        address = f"{self._address.host}:{self._address.port}"
        try:
            self._port = add_port(self._server, address, self._files)
        except RuntimeError as error:
            raise ConfigError(
                f"gRPC port {address} cannot be bound (is it in use?); choose another with "
                f"{self._address.port_option}"
            ) from error
        return self._port

    async def start(self) -> None:
        await self.set_ready(ready=False)
        for name in self._live_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._watching = asyncio.create_task(self._shares.run(self._port))

    async def set_ready(self, *, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def stop_and_cut(self, grace_s: float, live: Collection[Peer]) -> None:
        """Stops the server within `grace_s` seconds. Meanwhile it closes the connections of all
        clients that are not in `live` (clients with an authorized call). Other clients might send
        data that fills the memory."""
        stopping = asyncio.create_task(self.stop(grace_s))
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=_CUT_INTERVAL_S)
            await asyncio.to_thread(self._shares.cut_all_but, self._port, frozenset(live))
        await stopping

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls. Open calls that have not ended after `grace_s` seconds are
        cancelled."""
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
