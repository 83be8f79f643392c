"""The listener of an endpoint picker, which a router has in place of its public one."""

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

# The names of the endpoint picker protocol.
_MESSAGE_BYTES = 64 << 10  # around a body
_PROBES = HealthNames(ready=("readiness",), live=("liveness",))


class PickerListener:
    """`bind`, `start` and `stop` in this order; it has the methods of a public listener."""

    own_url = ""  # no other router calls it
    http_port = 0

    def __init__(
        self,
        config: RouterConfig,
        processor: grpc.GenericRpcHandler[Any, Any],
        fronts: FrontTable,
        clients: Clients,
        files: CertificateFiles | None = None,
    ) -> None:
        """The port speaks TLS if there are `files`."""
        self._fronts = fronts
        self._host, port = config.gateway.picker_address()
        address = Address(self._host, port, "--endpoint-picker")
        # A body of the largest size may come in one message.
        config = replace(config, body_bytes_max=config.body_bytes_max + _MESSAGE_BYTES)
        self.grpc = GrpcServer(config, {SERVICE: processor}, address, clients, files, _PROBES)
        self.grpc_port = 0

    def not_ready_reason(self) -> str:
        """Returns why it has nothing to pick; empty when it has."""
        return "" if self._fronts.endpoints else "no decode worker has a front"

    def bind(self) -> None:
        """Binds the port. Raises ConfigError if it is taken."""
        self.grpc_port = self.grpc.bind()

    async def start(self) -> None:
        """Serves gateways."""
        await self.grpc.start()

    def serve(self, _: object) -> asyncio.Task[None]:
        """Follows the fronts. Returns the task that does."""
        log.info("listening: endpoint picker %s:%d", self._host, self.grpc_port)
        return asyncio.create_task(self._fronts.run(), name="public")

    async def stop(
        self, deadline_s: float, serving: asyncio.Task[None], *, gives_way: bool = False
    ) -> None:
        """Takes nothing new, and waits for what is live."""
        await self.grpc.stop(deadline_s)
        await cancel(serving)
