"""The HTTP server: uvicorn, with limits on connections whose request has not arrived yet.

A connection is always in one of three phases, named after the bytes that the client sends next:

  phase    ends                        next     if the phase lasts too long
  header   when the header is          body     the client gets a 408; if no byte of the header has
           complete                             arrived, the connection is closed
  body     when the body is complete   idle     the client gets a 408 from `http/body`
  idle     at the first byte of the    header   the connection is closed after `keep_alive_s`
           next header

A connection starts in `header`, and passes through `body` even if a request has no body. A response
can be in progress in every phase, because a client may send a request before the answer to its
earlier request is complete (pipelining). Idle connections may be closed early to make room for new
connections (`connections.py`). Header bytes are counted before they reach the parser, because the
parser keeps all of them until the header is complete.

A refused connection gets a response: 400, 408, 431, or 503 if there are too many connections. If an
earlier request of the connection is still being answered, the connection is instead closed after
that answer. If a client does not read its response for `send_deadline_s`, the kernel closes the
connection (see `bind`).
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send
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
# A client may send requests before earlier ones are answered. At most this many requests of one
# connection wait in this way.
_PIPELINED_MAX = 16
# A refused connection is closed this many seconds after the response. If it were closed at once
# while bytes of the client are unread, TCP would reset the connection, and the client would lose
# the response.
_LINGER_S = 1.0
# At most this many refused connections stay open for _LINGER_S. Further ones are closed at once.
_LINGERING_MAX = 16
# The event loop accepts this many connections, then serves the open ones before it accepts more.
_ACCEPTED_AT_ONCE = 1
# If no file descriptor is free, no connection is accepted for this many seconds.
_ACCEPT_PAUSE_S = 1.0
_OTHER_FILES = 256  # file descriptors reserved for everything except HTTP connections
# A read of fewer bytes counts as small. Small reads inside a header are suspicious, because normal
# clients send a header in full network packets.
SMALL_READ_BYTES = 512
# After this many small reads inside one header, the connection is read more slowly (SlowReads).
SMALL_READS_MAX = 3
_SWEEP_S = 0.05
_READS_OF_ADDRESS = 8  # connections of one address that SlowReads reads every _SWEEP_S seconds


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers and without uvicorn's periodic main loop."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        clients: Clients,
        files: CertificateFiles | None = None,
    ) -> None:
        """Prepares the server. With `files` the port uses TLS."""
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
                # uvicorn must not replace the address of the connection by `X-Forwarded-For`,
                # because the log shows both addresses.
                proxy_headers=False,
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
            # `_accept` replaces asyncio's own callback. asyncio would accept and set up all waiting
            # connections at once, and the clients of open connections would wait meanwhile.
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
                log.error(
                    "HTTP connections cannot be accepted (%s); the router tries again in %g s",
                    error,
                    _ACCEPT_PAUSE_S,
                )
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listener)
                return
            crowded = self._connections.num_lingering >= _LINGERING_MAX
            if crowded and not self._connections.has_place(peer[0], loop.time()):
                _refuse_socket(sock)
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
            log.info("an HTTP connection could not be set up: %r", error)

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
    """Opens a listening socket. Raises ConfigError if the port is in use; the message names
    `port_option`, the option that sets the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol number is set explicitly, because asyncio sets TCP_NODELAY only then. Without
    # TCP_NODELAY each response is delayed by 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit TCP_USER_TIMEOUT. With this option the kernel closes a connection
    # if the client acknowledges no byte for `send_deadline_s`, or accepts no byte for that time
    # (receive window 0).
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
    IDLE = enum.auto()  # between two requests, while uvicorn's keep-alive timer runs
    HEADER = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    """One HTTP connection with limits on its headers, bodies and idle time."""

    def __init__(
        self, *, limits: RouterConfig, others: Connections, slow_reads: SlowReads, **more: Any
    ) -> None:
        super().__init__(**more)
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]
        self._limits = limits
        self._others = others
        self._slow_reads = slow_reads
        self._num_small_reads = 0  # number of small reads of the header that is arriving
        self._phase = _Phase.HEADER
        self._num_phases = 0  # number of phases entered so far
        self._watched_phase = -1  # `_num_phases` in the phase for which the timer was set
        self._timer: asyncio.TimerHandle | None = None
        # In the phase `header`: bytes of the header so far, at most `header_bytes_max`. In the
        # phase `body`: bytes of chunk extensions and trailer fields so far, with the same limit.
        self._header_bytes = 0
        self._is_refused = False
        self._lingers = False
        # uvicorn's object for the request that is being answered; later requests of the same
        # connection wait
        self._answered: RequestResponseCycle | None = None
        # (status, code, message) of the error response, set by a parser callback that refuses the
        # request
        self._refusal: tuple[int, str, str] | None = None
        # True: the header that is arriving has the field `Upgrade`, so `_parse` must parse it again
        self._has_upgrade = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        if reason := self._others.enter(self, peer, self.loop.time()):
            self._refuse(503, "too_many_connections", reason)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        # If the client resets the connection, uvicorn does not cancel its keep-alive timer. Until
        # the timer fires, this object and the last request would stay in memory.
        self._unset_keepalive_if_required()
        self._others.leave(self)
        self._others.num_lingering -= self._lingers
        self._lingers = False
        if isinstance(exc, TimeoutError):
            late_s = self._limits.send_deadline_s
            log.info("an HTTP connection was closed: the client read nothing for %g s", late_s)
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn reports a disconnect only to the latest request of the connection, which may
            # not be the one being answered.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._others.work(self)
        is_small = len(data) < SMALL_READ_BYTES
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
            if self._phase is _Phase.HEADER and self._is_all_answered():
                self._others.wait(self, self.loop.time())
                self._num_small_reads += is_small
                if self._num_small_reads > SMALL_READS_MAX and not self._others.is_proxy(self):
                    # Reading never pauses inside a body: if the server then refused the request and
                    # closed the connection with unread bytes, the client would lose the response.
                    self.transport.pause_reading()
                    self._slow_reads.wait(
                        self.client[0] if self.client else "", self._resume_reading
                    )

    def _parse(self, data: bytes) -> None:
        """Feeds bytes to the parser, like uvicorn's `data_received`, and ignores the header field
        `Upgrade` (a server may, RFC 9110 7.8).

        After a header with `Upgrade` the parser would treat the request's body as another protocol.
        So this method starts a new parser, which gets the header without the field `Upgrade` and
        then the remaining bytes.
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

    def _resume_reading(self) -> None:
        if not self.flow.read_paused:  # A refused connection is not read again.
            self.transport.resume_reading()

    def close_now(self) -> None:
        self.connections.discard(self)
        self.transport.close()

    def on_message_begin(self) -> None:
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADER)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser also calls this for trailer fields after a body, which are not part of the
        # header.
        if self._phase is not _Phase.BODY:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num = len(self.headers)
        num_max = self._limits.headers_max
        if num > num_max:
            message = f"the header has {num} fields; at most {num_max} are allowed"
            self._refusal = (431, "too_many_headers", message)
        elif len(self.pipeline) >= _PIPELINED_MAX:
            message = "too many requests of this connection wait for an answer; try again later"
            self._refusal = (503, "too_many_requests", message)
        elif self.parser.get_method() == b"CONNECT":
            message = "the method CONNECT is not supported, because this server is no proxy"
            self._refusal = (400, "invalid_request", message)
        elif reason := self._wrong_host():
            self._refusal = (400, "invalid_request", reason)
        if self._refusal is not None:
            # The parser fails with this error, and uvicorn then calls `send_400_response`.
            raise ValueError(self._refusal)
        if self.parser.should_upgrade():
            self._has_upgrade = True
            return
        super().on_headers_complete()
        # If a request arrives while an earlier one is being answered (pipelining), uvicorn stops
        # reading, and would not notice a disconnect. So reading continues here. Memory stays
        # limited: at most _PIPELINED_MAX requests wait, and uvicorn pauses while much of a body is
        # unread.
        self.flow.resume_reading()
        self._header_bytes = self._num_small_reads = 0
        self._enter(_Phase.BODY)

    def _wrong_host(self) -> str:
        """Returns what is wrong with the header's fields `Host` (RFC 9112, 3.2); "" if nothing."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1:
            return "the header has several fields Host; send one"
        if not num_hosts and self.parser.get_http_version() == "1.1":
            return "the header has no field Host, which HTTP/1.1 requires"
        return ""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        made: Any = _without_chunks(app, cycle) if is_old else app
        super()._start_asgi_task(cycle, made)

    def on_body(self, body: bytes) -> None:
        # From now on, `_header_bytes` counts chunk extensions and trailer fields of the body.
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._has_upgrade:
            return
        super().on_message_complete()
        # A client may send `Connection: close` in a trailer field after the body. The parser knows
        # this field then, but uvicorn does not.
        if not self.parser.should_keep_alive():
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
        """Refuses the connection. uvicorn calls this for every parser error."""
        self._refuse(*(self._refusal or (400, "invalid_request", msg)))

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._num_phases += 1

    def _watch(self) -> None:
        """Starts the timer of the current phase, unless the timer was already started in this
        phase. A request that arrives complete needs no timer."""
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
            # The route that reads the body has the same deadline and sends the 408. If the
            # connection is still open after another `body_deadline_s`, it is closed.
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
            # The connection is no longer read, so the rest of the request's body cannot arrive.
            cycle.disconnected = True
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
        if self.transport.can_write_eof():  # false for TLS, which has no half-closed connections
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _is_all_answered(self) -> bool:
        """Returns True if all requests of the connection have been answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Returns the app for a client of HTTP/1.0, which knows neither chunks nor `100 Continue`. The
    end of a response of unknown length is the end of the connection, which uvicorn closes after
    each response to such a client."""
    cycle.waiting_for_100_continue = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                fields = message.get("headers", ())
                has_length = any(name.lower() == b"content-length" for name, _ in fields)
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # uvicorn compares the bytes that it sends with this number.
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def _refusal(status: int, code: str, message: str) -> bytes:
    body = msgspec.json.encode(plain_error(status, message, code))
    head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    if status == 503:
        head += b"retry-after: 1\r\n"
    return STATUS_LINE[status] + head + b"connection: close\r\n\r\n" + body


_TOO_MANY_CONNECTIONS = _refusal(
    503, "too_many_connections", "the router has too many open connections; try again later"
)


def _refuse_socket(sock: socket.socket) -> None:
    """Sends a 503 and closes the connection at once, which costs little. If the client's bytes were
    not read, the client may see a reset instead of the 503."""
    with contextlib.suppress(OSError), sock:
        sock.setblocking(False)
        sock.send(_TOO_MANY_CONNECTIONS)


def _affordable_connections(num_wanted: int) -> int:
    """Raises the process's limit on open files as far as needed and allowed. Returns the number of
    HTTP connections for which the limit suffices, at most `num_wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    # gRPC may have as many connections as HTTP, so twice the number is needed.
    needed = 2 * num_wanted + _OTHER_FILES
    if soft != infinite and soft < needed:
        soft = needed if hard == infinite else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == infinite or soft >= needed:
        return num_wanted
    num = max(1, (soft - _OTHER_FILES) // 2)
    log.warning(
        "connections-max is %d, but the limit of %d open files allows only %d connections; raise "
        "`ulimit -n` to %d, or lower connections-max",
        num_wanted,
        soft,
        num,
        needed,
    )
    return num


class SlowReads:
    """Delays the reading of connections that send their header in many small pieces, so that such
    clients cannot use up the router's time.

    A connection with too many small reads waits for the next sweep before it is read again. A sweep
    runs every _SWEEP_S seconds, and reads at most _READS_OF_ADDRESS waiting connections of each
    address. For example, 100 such connections of one address share 160 reads per second. This class
    does not parse HTTP.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, address: str, read: Callable[[], None]) -> None:
        """Queues a connection's callback `read`, which a later sweep calls."""
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
