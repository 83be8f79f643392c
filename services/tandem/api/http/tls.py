"""TLS of the HTTP port: the handshake of a connection, before HTTP starts.

A connection has `header_deadline_s` for the handshake. After the handshake, the HTTP protocol takes
over the connection. The connection is closed if the handshake is late or fails (for example because
the client speaks plain HTTP), or if there are too many connections. The connection counts in the
connection limits from the moment it is accepted. If the certificate's file changes, later
handshakes use the new certificate.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tandem.api.http.connections import Connections
from tandem.net.rpc.certificates import CertificateFiles

log = logging.getLogger(__name__)

_SHUTDOWN_S = 5.0  # time for the TLS shutdown handshake; then the connection is aborted


class TlsHandshake(asyncio.Protocol):
    """A connection during its TLS handshake. It has the methods that uvicorn needs of an HTTP
    connection."""

    def __init__(
        self,
        *,
        protocol: Callable[..., asyncio.Protocol],
        files: CertificateFiles,
        deadline_s: float,
        others: Connections,
        server_state: Any,
        **more: Any,
    ) -> None:
        """After the handshake, `protocol(**more)` creates the object that speaks HTTP."""
        self._make: Callable[[], asyncio.Protocol] = lambda: protocol(
            server_state=server_state, **more
        )
        self._files = files
        self._deadline_s = deadline_s
        self._others = others
        self._server_state = server_state
        # decrypted bytes that arrived before the HTTP protocol was created
        self._received: list[bytes] = []
        self._ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        loop = asyncio.get_running_loop()
        peer = transport.get_extra_info("peername")
        if self._others.enter(self, str(peer[0]), loop.time()):
            transport.abort()
            return
        self._server_state.connections.add(self)
        # The first bytes are for the TLS handshake, so this protocol must not read them.
        transport.pause_reading()
        task = loop.create_task(self._handshake())
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._leave()

    def close_now(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """Aborts the connection when the server stops."""
        self._transport.abort()

    def _leave(self) -> None:
        self._others.leave(self)
        self._server_state.connections.discard(self)

    async def _handshake(self) -> None:
        context = self._files.current().context
        context.set_alpn_protocols(["http/1.1"])
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._deadline_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:  # includes ssl.SSLError and ConnectionError
            log.debug("a TLS handshake failed: %r", error)
            self._transport.abort()
            return
        finally:
            self._leave()
        if transport is None or self._ended:
            return
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._received:
            protocol.data_received(data)
