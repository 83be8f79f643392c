"""`tandem redis-front`: a TLS port in front of a Redis server that was built without TLS.

After the TLS handshake, a client whose certificate names a router, worker or controller of the
cluster is connected to the Unix socket of the Redis server. All other clients are disconnected. A
client whose handshake takes too long is disconnected, too. If there are too many connections, new
connections are closed.

Each handshake uses the latest certificate, so a renewed certificate needs no restart. Traffic is
forwarded without parsing. The Redis server checks users and passwords.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys

from tandem.common.config.redis_front import RedisFrontOptions
from tandem.common.config.tls import KINDS, certificate_name
from tandem.common.process.early_end import end_on_sigterm, quietly
from tandem.errors import ConfigError, TandemError
from tandem.net.rpc.certificates import CertificateFiles

log = logging.getLogger(__name__)

HANDSHAKE_DEADLINE_S = 10.0
CONNECTIONS_MAX = 4096
_BACKLOG = 512


class _Side(asyncio.Protocol):
    """A connection to a client or to Redis. `join` connects a connection A to a connection B. All
    bytes that A receives are then written to B, and A stops reading while B cannot write. The same
    is true in the other direction.

    A connection reads nothing until `join` is called.
    """

    transport: asyncio.Transport
    _other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()

    def join(self, other: _Side) -> None:
        self._other = other
        other._other = self
        self.transport.resume_reading()
        other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._other is not None:
            self._other.transport.close()


class RedisFront:
    """The TLS port. `run` serves clients until it is cancelled."""

    def __init__(self, options: RedisFrontOptions) -> None:
        """Binds the port. Raises ConfigError if the folder has no usable certificate, or if the
        port is in use."""
        self._options = options
        self._files = CertificateFiles.in_folder(options.tls_dir)
        self._names = {certificate_name(kind, options.cluster_id) for kind in KINDS}
        self.num_open = 0
        try:
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            address = (options.host, options.port)
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error}") from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Accepts connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        with self._listener:
            while True:
                accepted, address = await loop.sock_accept(self._listener)
                if len(tasks) + self.num_open >= CONNECTIONS_MAX:
                    log.warning(
                        "the connection from %s is refused: %d connections are open, at most %d "
                        "are allowed",
                        address,
                        self.num_open,
                        CONNECTIONS_MAX,
                    )
                    accepted.close()
                    continue
                task = loop.create_task(self._serve(accepted, str(address[0])))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._files.current().context
        context.verify_mode = ssl.CERT_REQUIRED
        loop = asyncio.get_running_loop()
        client = _Client(self)
        try:
            await loop.connect_accepted_socket(
                lambda: client, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_DEADLINE_S
            )
            if not self._names & _names_of(client.transport):
                log.warning(
                    "the connection from %s is refused: its certificate names no process of this "
                    "cluster",
                    address,
                )
                client.transport.close()
                return
            _, server = await loop.create_unix_connection(_Side, self._options.socket)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            # A TCP probe disconnects without a handshake. For example, kubelet probes every 2 s.
            probe = isinstance(error, ConnectionResetError) and not hasattr(client, "transport")
            level = logging.DEBUG if probe else logging.INFO
            log.log(
                level, "the connection from %s ended before it reached Redis: %r", address, error
            )
            accepted.close()
            if hasattr(client, "transport"):
                client.transport.abort()
            return
        client.join(server)


class _Client(_Side):
    """A client's connection. While it is open, `RedisFront.num_open` includes it."""

    def __init__(self, front: RedisFront) -> None:
        self._front = front

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._front.num_open += 1
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._front.num_open -= 1
        super().connection_lost(error)


def _names_of(transport: asyncio.Transport) -> set[str]:
    """Lists the DNS names in the peer's certificate."""
    certificate = transport.get_extra_info("peercert") or {}
    return {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}


async def _run(options: RedisFrontOptions) -> None:
    front = RedisFront(options)
    log.info(
        "listening on %s:%d with TLS for the Redis socket %s",
        options.host,
        front.port,
        options.socket,
    )
    serving = asyncio.create_task(front.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def main() -> int:
    """Runs the program. Returns exit status 2 for invalid settings, 0 after SIGTERM."""
    from tandem.common.options import read
    from tandem.net.observability.logs import configure_logging

    options = read(RedisFrontOptions, "tandem redis-front")
    configure_logging("redis-front")
    try:
        asyncio.run(_run(options))
    except TandemError as error:
        print(f"redis-front: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_on_sigterm()
    quietly(main)
