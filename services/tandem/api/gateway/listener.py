"""The gRPC listener of a router that runs as an endpoint picker. Such a router has this listener
instead of the public one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc

from tandem.api.gateway.ext_proc import SERVICE
from tandem.api.gateway.fronts import FrontTable
from tandem.api.grpc.server import Address, GrpcServer, HealthNames
from tandem.common.config.router import RouterConfig
from tandem.common.process.cancellation import cancel
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 64 << 10  # largest size of a gateway's message, besides the HTTP body in it
# The endpoint picker protocol requires these two names in the health service.
_PROBES = HealthNames(ready=("readiness",), live=("liveness",))


class PickerListener:
    """Serves the endpoint picker to gateways. The methods are those of PublicListener: the caller
    calls `bind`, `start`, `serve` and `stop`, in this order."""

    own_url = ""  # empty, because no other router calls an endpoint picker
    http_port = 0

    def __init__(
        self,
        config: RouterConfig,
        processor: grpc.GenericRpcHandler[Any, Any],
        fronts: FrontTable,
        clients: Clients,
        files: CertificateFiles | None = None,
    ) -> None:
        """Prepares the port without binding it. With `files` (certificates) the port uses TLS."""
        self._fronts = fronts
        self._host, port = config.gateway.picker_address()
        address = Address(self._host, port, "--endpoint-picker")
        # A gateway may send the largest allowed body in one message.
        config = replace(config, body_bytes_max=config.body_bytes_max + _MESSAGE_BYTES)
        self.grpc = GrpcServer(config, {SERVICE: processor}, address, clients, files, _PROBES)
        self.grpc_port = 0

    def not_ready_reason(self) -> str:
        """Returns the reason why no endpoint can be picked. Returns "" if one can be picked."""
        return (
            ""
            if self._fronts.endpoints
            else (
                "no decode worker has a router in front of it; start a router with --front-of "
                "WORKER_ID"
            )
        )

    def bind(self) -> None:
        """Binds the port. Raises ConfigError if the port is in use."""
        self.grpc_port = self.grpc.bind()

    async def start(self) -> None:
        """Starts to serve gateways."""
        await self.grpc.start()

    def serve(self, _: object) -> asyncio.Task[None]:
        """Starts the task that updates the table of fronts. Returns this task."""
        log.info("the endpoint picker listens on %s:%d", self._host, self.grpc_port)
        return asyncio.create_task(self._fronts.run(), name="public")

    async def stop(
        self, deadline_s: float, serving: asyncio.Task[None], *, cuts_idle: bool = False
    ) -> None:
        """Refuses new streams, and waits at most `deadline_s` seconds until the open streams
        end."""
        await self.grpc.stop(deadline_s)
        await cancel(serving)
