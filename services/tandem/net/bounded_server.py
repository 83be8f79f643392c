"""A WSGI server for ports with few, short calls, which unauthenticated clients cannot exhaust.

Each connection has one call. A client has DEADLINE_S for the TLS handshake and for sending the
header and the body. The server then calls the application, writes the answer within another
DEADLINE_S, and closes the connection.

If a connection limit is reached, the server closes an open connection to make room for a new one.
It chooses an address, and closes that address's oldest connection whose request is incomplete:
- If the address of the new connection has PER_ADDRESS_MAX connections, this address is chosen.
- If the server has CONNECTIONS_MAX connections, the address with the most connections is chosen.

So an address that opens many silent connections loses these connections first. A connection that is
younger than _MATURE_S may still send its request. Such a connection is closed only if its address
has more connections than the address of the new connection will have. Otherwise the new connection
waits.

One thread with an event loop reads all connections, and CALLS_AT_ONCE threads run the application.
A silent connection holds no thread and costs only a few kilobytes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11

log = logging.getLogger(__name__)

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]

CONNECTIONS_MAX = 256
PER_ADDRESS_MAX = 64
CALLS_AT_ONCE = 2
# Seconds in which a request must arrive, from the start of the connection. Sending the response
# must also take at most this many seconds.
DEADLINE_S = 10.0
# A connection younger than this many seconds is usually not closed to make room for another one,
# because the request may still be on the way.
_MATURE_S = 0.25
_WAITING_MAX = 256  # maximum number of connections that wait because a connection limit is reached
_WAIT_S = 3.0
_CHECK_INTERVAL_S = 0.05  # how often a waiting connection checks whether it can be served
_HEADER_BYTES_MAX = 16 << 10
_BODY_BYTES_MAX = 64 << 10
_READ_BYTES = 16 << 10
_BACKLOG = 128
# Pause after the server could not accept a connection, for example because the process has too many
# open files.
_ACCEPT_PAUSE_S = 0.5
_CLOSE_MAX_S = 5.0
# Seconds for which the server keeps a connection open after the answer, to read remaining bytes of
# the request. If the server closed a connection with unread bytes, the kernel would reset the
# connection, and the client might lose the answer.
_LINGER_S = 1.0


@dataclass(eq=False, slots=True)
class _Connection:
    address: str
    opened_at: float
    task: asyncio.Task[None] | None = None
    has_call: bool = False


class BoundedServer:
    """Serves an application from its own threads until `close`."""

    def __init__(
        self,
        app: WsgiApp,
        host: str,
        port: int,
        *,
        name: str,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Binds the port and starts to serve. `name` is the name of the server's thread. If
        `context` is given, the port uses TLS. Raises OSError if the port cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._app = app
        self._context = context
        self._open: dict[_Connection, None] = {}  # open connections, oldest first
        self._num_of: Counter[str] = Counter()
        self._waiting: set[asyncio.Task[None]] = set()
        self._callers = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix=f"{name}-call")
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(RuntimeError):  # raised if the event loop is already closed
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join(_CLOSE_MAX_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        tasks = [*self._waiting, *(c.task for c in self._open if c.task is not None)]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._callers.shutdown(wait=False)
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                sock, peer = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error(
                    "the HTTP server cannot accept connections now (%s) and tries again soon", error
                )
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            address = str(peer[0])
            if self._make_room(address):
                self._take(address, sock)
            elif len(self._waiting) < _WAITING_MAX:
                waiting = self._loop.create_task(self._wait_for_room(address, sock))
                self._waiting.add(waiting)
                waiting.add_done_callback(self._waiting.discard)
                waiting.add_done_callback(partial(_close_untaken, sock))
            else:
                sock.close()

    async def _wait_for_room(self, address: str, sock: socket.socket) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not self._make_room(address):  # noqa: ASYNC110
                await asyncio.sleep(_CHECK_INTERVAL_S)
        self._take(address, sock)

    def _take(self, address: str, sock: socket.socket) -> None:
        connection = _Connection(address, self._loop.time())
        self._open[connection] = None
        self._num_of[address] += 1
        connection.task = self._loop.create_task(self._serve(connection, sock))
        connection.task.add_done_callback(partial(self._forget, connection))

    def _make_room(self, address: str) -> bool:
        """Returns True if a new connection of this address can be served now. If a connection limit
        is reached, the method closes another connection. It returns False if no connection may be
        closed."""
        if self._num_of[address] >= PER_ADDRESS_MAX:
            fullest = address
        elif len(self._open) >= CONNECTIONS_MAX:
            fullest = self._num_of.most_common(1)[0][0]
        else:
            return True
        for connection in self._open:
            if connection.address == fullest and not connection.has_call:
                is_young = self._loop.time() - connection.opened_at < _MATURE_S
                if is_young and self._num_of[fullest] <= self._num_of[address] + 1:
                    return False
                assert connection.task is not None
                connection.task.cancel()
                self._forget(connection)
                return True
        return False

    def _forget(self, connection: _Connection, _: object = None) -> None:
        if connection in self._open:
            del self._open[connection]
            self._num_of[connection.address] -= 1
            if not self._num_of[connection.address]:
                del self._num_of[connection.address]

    async def _serve(self, connection: _Connection, sock: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                reader, writer = await self._streams(sock)
                http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEADER_BYTES_MAX)
                try:
                    request, body = await _read_call(http, reader, writer)
                except h11.RemoteProtocolError as error:
                    request = None
                    answer = _plain(error.error_status_hint, f"{error}\n")
                connection.has_call = True
            if request is not None:
                environ = _environ(request, body, connection.address)
                answer = await self._loop.run_in_executor(self._callers, _call, self._app, environ)
            async with asyncio.timeout(DEADLINE_S):
                # With a limit of 0, `drain` waits until all bytes have been sent.
                writer.transport.set_write_buffer_limits(0)
                is_head = request is not None and request.method == b"HEAD"
                writer.write(_to_bytes(http, *answer, is_head=is_head))
                await writer.drain()
            connection.has_call = False
            async with asyncio.timeout(_LINGER_S):
                writer.write_eof() if writer.can_write_eof() else writer.close()
                while await reader.read(_READ_BYTES):
                    pass
        except (OSError, TimeoutError, EOFError) as error:
            log.debug("the connection from %s ended early: %r", connection.address, error)
        finally:
            if writer is not None:
                writer.transport.abort()
            sock.close()

    async def _streams(
        self, sock: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self._context,
            ssl_handshake_timeout=DEADLINE_S if self._context else None,
            ssl_shutdown_timeout=1.0 if self._context else None,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)


def _close_untaken(sock: socket.socket, waiting: asyncio.Task[None]) -> None:
    if waiting.cancelled() or waiting.exception() is not None:
        sock.close()


_Answer = tuple[int, list[tuple[str, str]], bytes]


async def _read_call(
    http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[h11.Request, bytes]:
    """Reads one request and returns it with the body. Raises RemoteProtocolError for a malformed
    request, EOFError if the client sends no request, and OSError."""
    request: h11.Request | None = None
    body = b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            if http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                writer.write(http.send(go_on) or b"")
            data = await reader.read(_READ_BYTES)
            if not data and request is None and not http.trailing_data[0]:
                raise EOFError("the client sent no request")
            http.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
            lengths = [value for name, value in event.headers if name == b"content-length"]
            _check_length(int(lengths[0]) if lengths else 0)
        elif isinstance(event, h11.Data):
            body += event.data
            _check_length(len(body))
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, body
        else:
            raise EOFError("the client closed the connection")


def _check_length(num_bytes: int) -> None:
    if num_bytes > _BODY_BYTES_MAX:
        raise h11.RemoteProtocolError(
            f"the body must have at most {_BODY_BYTES_MAX} bytes", error_status_hint=413
        )


def _environ(request: h11.Request, body: bytes, address: str) -> dict[str, Any]:
    """Builds the WSGI environment (PEP 3333), with only the variables that the applications use."""
    path, _, query = request.target.decode("latin-1").partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method.decode("ascii"),
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "REMOTE_ADDR": address,
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
    }
    for name, value in request.headers:
        key = "HTTP_" + name.decode("ascii").upper().replace("-", "_")
        environ.setdefault(key, value.decode("latin-1"))
    return environ


def _call(app: WsgiApp, environ: dict[str, Any]) -> _Answer:
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]]) -> None:
        begun.append((status, headers))

    try:
        body = b"".join(app(environ, start_response))
        status, headers = begun[-1]
        return int(status.split(" ")[0]), headers, body
    except Exception:
        log.exception("the HTTP request for %s failed", environ["PATH_INFO"][:200])
        return _plain(500, "an internal error\n")


def _plain(status: int, text: str) -> _Answer:
    return status, [("Content-Type", "text/plain; charset=utf-8")], text.encode()


def _to_bytes(
    http: h11.Connection,
    status: int,
    fields: list[tuple[str, str]],
    body: bytes,
    *,
    is_head: bool,
) -> bytes:
    kept = [(name, value) for name, value in fields if name.lower() != "content-length"]
    headers = [*kept, ("Content-Length", str(len(body))), ("Connection", "close")]
    head = http.send(h11.Response(status_code=status, headers=headers)) or b""
    return head if is_head else head + body
