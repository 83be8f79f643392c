"""A gRPC server of a router: bounds on connections, health and reflection beside its services."""

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
from tandem.net.rpc.failures import FailureInterceptor, log_lost_peers_calmly
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.peer_calls import add_port
from tandem.net.security.clients import Clients

METADATA_BYTES_MAX = 16 << 10  # of one call, by HTTP/2's count: 32 bytes more for each field
IDLE_S = 300.0  # of a connection without calls; channels connect again by themselves
STREAMS_MAX = 1024  # calls at once of one connection; a client lets further ones wait
PING_STRIKES_MAX = 2  # pings too soon, after which a connection is closed
_CUT_INTERVAL_S = 0.1
AGE_S = 1800.0  # of a connection; then it takes no new call, and its channel connects again


class Address(NamedTuple):
    """The address of a server, and the option that chooses another port."""

    host: str
    port: int
    port_option: str


class HealthNames(NamedTuple):
    """Further names that the health service answers for, beside the services'."""

    ready: tuple[str, ...] = ()  # as `set_ready` says
    live: tuple[str, ...] = ()  # SERVING until the server stops


class GrpcServer:
    """One port: `bind` and `start` it, `set_ready` sets what health reports, `stop` drains."""

    def __init__(
        self,
        config: RouterConfig,
        services: Mapping[str, grpc.GenericRpcHandler[Any, Any]],
        address: Address,
        clients: Clients,
        files: CertificateFiles | None = None,
        probes: HealthNames = HealthNames(),
    ) -> None:
        """`services` has handlers by the service's name. With `files` the port speaks TLS."""
        self._files = files
        self._address = address
        self._names = ("", *services, *probes.ready)
        self._live_names = probes.live
        log_lost_peers_calmly()
        self._server = grpc.aio.server(
            interceptors=[FailureInterceptor()],
            options=[
                *((k, v) for k, v in SERVER_OPTIONS if k != "grpc.max_receive_message_length"),
                # The bounds of a connection, with HTTP's values where HTTP has the same bound.
                ("grpc.max_receive_message_length", config.body_bytes_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.server_handshake_timeout_ms", round(config.header_deadline_s * 1000)),
                ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
                ("grpc.max_allowed_incoming_connections", config.connections_max),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
                # A stream whose client stalls stays until its connection ends, if nothing else.
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
        """Binds and returns the port. Raises ConfigError if it is taken."""
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

    async def give_way(self, grace_s: float, live: Collection[Peer]) -> None:
        """Stops, and meanwhile cuts the connections of peers that are not `live`: one of them may
        be what fills the memory of this process."""
        stopping = asyncio.create_task(self.stop(grace_s))
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=_CUT_INTERVAL_S)
            await asyncio.to_thread(self._shares.cut_all_but, self._port, frozenset(live))
        await stopping

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits for live ones, then cancels them."""
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
