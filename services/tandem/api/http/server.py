"""The HTTP server: uvicorn, with bounds on what a connection may cost before a request is there.

    header --complete--> body --complete--> idle --first byte--> header
      |                   |                  |
      408 or closed       408 (http_body)    closed after `keep_alive_s`, or for a new connection

A connection starts in `header`, and goes through `body` even where there is none. Answers are on
their way in each phase. The bytes of a header are counted before the parser sees them: it keeps
all of them until the header is complete. A connection that is refused gets an answer (400, 408,
431, or 503 if there are too many), unless an earlier request is still being answered: then it ends
with that answer. In each phase the kernel ends a connection whose client takes no byte of an answer
for `send_deadline_s` (`bind`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tandem.api.http.connections import Connections
from tandem.api.http.tls import TlsHandshake
from tandem.api.openai.errors import plain_error
from tandem.common.config.router import RouterConfig
from tandem.errors import ConfigError
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_BACKLOG = 2048
_PIPELINED_MAX = 16  # requests that were sent before the answer to an earlier one
_LINGER_S = 1.0  # that a client has to read why it is refused, before its unread bytes reset it
_LINGERING_MAX = 16  # connections at once; beyond it they are closed without delay
_ACCEPTED_AT_ONCE = 1  # connections between two turns of those that are open
_ACCEPT_PAUSE_S = 1.0  # while the system has no file for a new connection
_OTHER_FILES = 256  # descriptors for everything but HTTP connections
LITTLE_BYTES = 512  # a network packet that is not the last of a header has more
FREE_READS = 3  # of little, for each header
_SWEEP_S = 0.05
_READS_OF_ADDRESS = 8  # in a sweep


class HttpServer(uvicorn.Server):
    """A uvicorn server without its signal handlers, and without its ten wake-ups a second."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        clients: Clients,
        files: CertificateFiles | None = None,
    ) -> None:
        """The port speaks TLS if there are `files`."""
        num_max = _affordable_connections(config.connections_max)
        self._connections = Connections(num_max, config.connections_per_address_max, clients)
        protocol: Any = functools.partial(
            BoundedProtocol, limits=config, others=self._connections, slow_reads=SlowReads()
        )
        if files is not None:
            protocol = functools.partial(
                TlsHandshake,
                protocol=protocol,
                files=files,
                deadline_s=config.header_deadline_s,
                others=self._connections,
            )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,  # the log of changes names the peer, and a proxy's word apart
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=round(config.drain_deadline_s),
            )
        )
        self._stopping = asyncio.Event()
        self._accepted: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # In the place of asyncio's own callback. That one takes a whole backlog at a time, and
            # makes a connection of each before it can be refused: both hold up other clients.
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def begin_stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no HTTP connection can be accepted for now: %s", error)
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
                return
            crowded = self._connections.num_lingering >= _LINGERING_MAX
            if crowded and not self._connections.has_place(peer[0], loop.time()):
                _turn_away(sock)
                continue
            sock.setblocking(False)
            made = loop.connect_accepted_socket(self._protocol, sock, ssl=self.config.ssl)
            task = loop.create_task(made)
            self._accepted.add(task)
            task.add_done_callback(self._on_accepted)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _on_accepted(self, task: asyncio.Task[Any]) -> None:
        self._accepted.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("an HTTP connection could not be made: %r", error)

    def _protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        state = self.lifespan.state
        protocol: asyncio.Protocol = made(
            config=self.config, server_state=self.server_state, app_state=state
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, *, port_option: str, send_deadline_s: float) -> socket.socket:
    """Returns a socket that listens. Raises ConfigError for a taken port, naming its option."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it each answer waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. The kernel ends one whose peer acknowledges no byte, or
    # leaves its window at zero, for so long; every byte that is taken begins the time anew.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(send_deadline_s * 1000))
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"HTTP port {host}:{port} cannot be bound ({error.strerror}); choose another with "
            f"{port_option}"
        ) from error
    return sock


class _Phase(enum.Enum):
    IDLE = enum.auto()  # between two requests; uvicorn's keep-alive timer runs
    HEADER = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    """One HTTP connection, within bounds on its headers, bodies and idle time."""

    def __init__(
        self, *, limits: RouterConfig, others: Connections, slow_reads: SlowReads, **more: Any
    ) -> None:
        super().__init__(**more)
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]
        self._limits = limits
        self._others = others
        self._slow_reads = slow_reads
        self._num_little = 0  # reads of few bytes that did not complete the header
        self._phase = _Phase.HEADER
        self._num_phases = 0  # entered so far
        self._watched_phase = -1  # the one that the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # given to the parser since it last gave something back
        self._is_refused = False
        self._lingers = False
        self._answered: RequestResponseCycle | None = None  # not a pipelined one that waits
        self._refusal: tuple[int, str, str] | None = None  # raised in a callback of the parser
        self._has_upgrade = False  # the parser stops behind this header

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        if reason := self._others.enter(self, peer, self.loop.time()):
            self._refuse(503, "too_many_connections", reason)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        # uvicorn leaves this timer where the client reset the connection, and with it the whole
        # connection and its last request in memory until it fires.
        self._unset_keepalive_if_required()
        self._others.leave(self)
        self._others.num_lingering -= self._lingers
        self._lingers = False
        if isinstance(exc, TimeoutError):
            late_s = self._limits.send_deadline_s
            log.info("an HTTP client was cut: it took no byte for %g s", late_s)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True  # uvicorn tells the latest request only
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._others.work(self)
        is_little = len(data) < LITTLE_BYTES
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADER)
        while data and not (self._is_refused or self.transport.is_closing()):
            room = self._limits.header_bytes_max - self._header_bytes
            part = data[:room]
            data = data[room:]
            self._header_bytes += len(part)
            self._parse(part)
            if self._header_bytes >= self._limits.header_bytes_max and not self._is_refused:
                message = f"the header is larger than {self._limits.header_bytes_max} bytes"
                self._refuse(431, "header_too_large", message)
        if not self._is_refused:
            self._watch()
            if self._phase is _Phase.HEADER and self._is_unasked():
                self._others.wait(self, self.loop.time())
                self._num_little += is_little
                if self._num_little > FREE_READS and not self._others.is_proxy(self):
                    # Not for bodies: closed with bytes unread, a connection loses its answer.
                    self.transport.pause_reading()
                    self._slow_reads.wait(self.client[0] if self.client else "", self._read_on)

    def _parse(self, data: bytes) -> None:
        """Gives bytes to the parser, as uvicorn's `data_received` does, and ignores `Upgrade`.

        The parser takes all bytes behind a header with `Upgrade` for another protocol, the body
        included. So a new parser gets the same header without the field, and then these bytes. A
        server may ignore the field (RFC 9110 7.8).
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    (num_parsed,) = upgrade.args
                    header = self._header_without_upgrade()
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    self._has_upgrade = False
                    self.parser.feed_data(header)
                    data = data[num_parsed:]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _header_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return line + b"".join(fields) + b"\r\n"

    def _read_on(self) -> None:
        if not self.flow.read_paused:  # a refused connection is not read again
            self.transport.resume_reading()

    def give_way(self) -> None:
        self.connections.discard(self)
        self.transport.close()

    def on_message_begin(self) -> None:
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADER)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not _Phase.BODY:  # fields behind a body are no part of the header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num = len(self.headers)
        num_max = self._limits.headers_max
        if num > num_max:
            message = f"the header has {num} fields; at most {num_max} are taken"
            self._refusal = (431, "too_many_headers", message)
        elif len(self.pipeline) >= _PIPELINED_MAX:
            self._refusal = (503, "too_many_requests", "too many requests wait for an answer")
        elif self.parser.get_method() == b"CONNECT":
            self._refusal = (400, "invalid_request", "CONNECT is for proxies; this is none")
        if self._refusal is not None:
            raise ValueError(self._refusal)  # ends the parser, which calls `send_400_response`
        if self.parser.should_upgrade():
            self._has_upgrade = True
            return
        super().on_headers_complete()
        # uvicorn stops reading after a pipelined request, and would not see that the client is
        # gone; their number is bounded here, and their bodies pause the reading by themselves.
        self.flow.resume_reading()
        self._header_bytes = self._num_little = 0
        self._enter(_Phase.BODY)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0  # what else a chunk has, and fields after the body, stay bounded
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._has_upgrade:
            return
        super().on_message_complete()
        if not self.parser.should_keep_alive():  # a field behind the body may say so, too
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        self._header_bytes = 0
        self._enter(_Phase.IDLE)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.IDLE and not (self.pipeline or self.transport.is_closing()):
            self._others.rest(self)

    def send_400_response(self, msg: str) -> None:
        """Refuses the connection; uvicorn calls this for every error of the parser."""
        self._refuse(*(self._refusal or (400, "invalid_request", msg)))

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._num_phases += 1

    def _watch(self) -> None:
        """Starts the deadline of the current phase, once; a request that came whole needs none."""
        if self._watched_phase == self._num_phases:
            return
        self._watched_phase = self._num_phases
        limits = self._limits
        deadlines_s = {_Phase.HEADER: limits.header_deadline_s, _Phase.BODY: limits.body_deadline_s}
        self._set_timer(deadlines_s.get(self._phase))

    def _set_timer(self, deadline_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadline_s is not None:
            self._timer = self.loop.call_later(deadline_s, self._on_late)

    def _on_late(self) -> None:
        if self._phase is _Phase.HEADER and self._header_bytes:
            late_s = self._limits.header_deadline_s
            message = f"the header was not complete within {late_s:g} s"
            self._refuse(408, "header_too_late", message)
        elif self._phase is _Phase.BODY and not self.cycle.response_complete:
            # The route that reads the body has the same deadline, and answers; look again.
            self._set_timer(self._limits.body_deadline_s)
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._is_refused = True
        self._set_timer(None)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self._phase is not _Phase.BODY or cycle.response_started or self.pipeline:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # its body cannot come any more
            cycle.message_event.set()
        self.transport.write(_refusal(status, code, message))
        if self._others.num_lingering >= _LINGERING_MAX:
            self.transport.close()
            return
        self.connections.discard(self)
        self._others.leave(self)
        self._others.num_lingering += 1
        self._lingers = True
        self.flow.pause_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connection
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _is_unasked(self) -> bool:
        """Returns whether no request of the connection waits for its answer."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)


def _refusal(status: int, code: str, message: str) -> bytes:
    body = msgspec.json.encode(plain_error(status, message, code))
    head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    if status == 503:
        head += b"retry-after: 1\r\n"
    return STATUS_LINE[status] + head + b"connection: close\r\n\r\n" + body


_TURNED_AWAY = _refusal(503, "too_many_connections", "there are too many connections")


def _turn_away(sock: socket.socket) -> None:
    """Refuses a connection as cheaply as possible; unread bytes may reset it before its answer."""
    with contextlib.suppress(OSError), sock:
        sock.setblocking(False)
        sock.send(_TURNED_AWAY)


def _affordable_connections(num_wanted: int) -> int:
    """Raises the limit of open files as far as needed and allowed; returns how many fit in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    needed = 2 * num_wanted + _OTHER_FILES  # gRPC has as many connections
    if soft != infinite and soft < needed:
        soft = needed if hard == infinite else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == infinite or soft >= needed:
        return num_wanted
    num = max(1, (soft - _OTHER_FILES) // 2)
    log.warning(
        "connections-max is %d, but only %d open files are allowed: at most %d connections are "
        "taken; raise `ulimit -n` to %d",
        num_wanted,
        soft,
        num,
        needed,
    )
    return num


class SlowReads:
    """The waiting connections of one server.

    read --little came, and the header is incomplete--> waiting --its address's turn--> read

    A waiting connection is not read: what it sends stays in the kernel. Each sweep lets some of
    every address be read again, so that the work for an address is bounded however many connections
    it has and whatever they send, and no address waits for another. Knows no HTTP.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, address: str, read: Callable[[], None]) -> None:
        """Calls `read` when it is the connection's turn."""
        self._waiting.setdefault(address, deque()).append(read)
        if self._timer is None:
            self._start()

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        for address, waiting in list(self._waiting.items()):
            for _ in range(min(_READS_OF_ADDRESS, len(waiting))):
                waiting.popleft()()
            if not waiting:
                del self._waiting[address]
        if self._waiting:
            self._start()
