"""A bounded server answers calls beside connections that are silent, slow or wrong."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.net import bounded_server
from tandem.net.bounded_server import BoundedServer

HERE = "127.0.0.1"
LARGE = b"x" * (4 << 20)


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answers the call's own words; /large is more than sockets hold, /broken fails."""
    if environ["PATH_INFO"] == "/broken":
        raise RuntimeError("broken")
    start_response("200 OK", [("Content-Type", "text/plain")])
    if environ["PATH_INFO"] == "/large":
        return [LARGE]
    body = environ["wsgi.input"].read()
    return [f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} ".encode(), body]


@pytest.fixture
def server() -> Iterator[BoundedServer]:
    made = BoundedServer(app, HERE, 0, name="test-server")
    yield made
    made.close()


def call(
    server: BoundedServer,
    method: str = "GET",
    path: str = "/",
    body: bytes | None = None,
    *,
    source: str = HERE,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(
        HERE, server.port, timeout=20, source_address=(source, 0)
    )
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def raw(server: BoundedServer, *packets: bytes) -> bytes:
    """Everything that comes back for these bytes."""
    with socket.create_connection((HERE, server.port), timeout=20) as sock:
        for packet in packets:
            sock.sendall(packet)
            time.sleep(0.01)  # else the kernel joins them
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1 << 16):
                answer += part
        return answer


def test_calls_are_answered(server: BoundedServer) -> None:
    assert call(server) == (200, b"GET / ")
    assert call(server, "POST", "/a?b=c", b"body") == (200, b"POST /a body")
    assert call(server, "HEAD", "/a") == (200, b"")
    assert call(server, path="/large") == (200, LARGE)
    assert call(server, path="/broken")[0] == 500


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "header"])
def test_silent_connections_cost_no_thread_and_make_room(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(bounded_server, "_MATURE_S", 0.05)
    call(server)
    before = num_threads()
    with contextlib.ExitStack() as opened:
        for _ in range(3 * bounded_server.PER_ADDRESS_MAX):
            sock = opened.enter_context(socket.create_connection((HERE, server.port), timeout=20))
            with contextlib.suppress(OSError):
                sock.sendall(sent)
        give_up_at = time.monotonic() + 20
        while True:  # one that came in the burst may be refused
            try:
                assert call(server) == (200, b"GET / ")
                break
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < give_up_at
        assert num_threads() <= before + bounded_server.CALLS_AT_ONCE
        assert len(server._open) <= bounded_server.PER_ADDRESS_MAX


def silent(server: BoundedServer, num: int, *, source: str = HERE) -> contextlib.ExitStack:
    """So many silent connections of an address; the server has taken all when this returns."""
    opened = contextlib.ExitStack()
    before = len(server._open)
    for _ in range(num):
        address = (HERE, server.port)
        opened.enter_context(socket.create_connection(address, 20, source_address=(source, 0)))
    give_up_at = time.monotonic() + 20
    while len(server._open) < before + num:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return opened


def test_a_call_waits_until_a_young_connection_of_its_address_makes_room(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "_MATURE_S", 60.0)
    with silent(server, bounded_server.PER_ADDRESS_MAX):
        answers: list[tuple[int, bytes]] = []
        caller = threading.Thread(target=lambda: answers.append(call(server)))
        caller.start()
        give_up_at = time.monotonic() + 20
        while not server._waiting:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        monkeypatch.setattr(bounded_server, "_MATURE_S", 0.0)
        caller.join()
    assert answers == [(200, b"GET / ")]


def test_young_connections_of_full_addresses_make_room_for_another_address(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "_MATURE_S", 60.0)
    num = bounded_server.CONNECTIONS_MAX // bounded_server.PER_ADDRESS_MAX
    with contextlib.ExitStack() as opened:
        for i in range(num):
            address = f"127.0.0.{10 + i}"
            opened.enter_context(silent(server, bounded_server.PER_ADDRESS_MAX, source=address))
        assert call(server, source="127.0.0.99") == (200, b"GET / ")


def test_close_ends_connections_that_wait_for_room(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "_MATURE_S", 60.0)
    with (
        silent(server, bounded_server.PER_ADDRESS_MAX),
        socket.create_connection((HERE, server.port), timeout=20) as waits,
    ):
        give_up_at = time.monotonic() + 20
        while not server._waiting:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        server.close()
        assert waits.recv(1) == b""


def test_a_slow_call_is_cut_off(server: BoundedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_server, "DEADLINE_S", 0.3)
    assert raw(server, b"GET / HTTP/1.1\r\nHost: x\r\n") == b""
    assert raw(server, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc") == b""


def test_a_client_that_takes_no_answer_is_cut_off(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "DEADLINE_S", 0.3)
    with socket.create_connection((HERE, server.port), timeout=20) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        give_up_at = time.monotonic() + 20
        while server._open:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * (20 << 10), 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n", 0),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
            200,
        ),
    ],
)
def test_wrong_and_odd_calls(
    server: BoundedServer, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(bounded_server, "DEADLINE_S", 1.0)
    answer = raw(server, sent)
    if not status:
        assert answer == b""  # its body never ends
        return
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_client_may_wait_for_a_100(server: BoundedServer) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection((HERE, server.port), timeout=20) as sock:
        sock.sendall(head)
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"ab")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_the_port_is_free_and_the_threads_are_gone_after_close() -> None:
    made = BoundedServer(app, HERE, 0, name="closed-server")
    with socket.create_connection((HERE, made.port)):
        call(made)
        made.close()
    BoundedServer(app, HERE, made.port, name="closed-server").close()
    assert not [t for t in threading.enumerate() if t.name == "closed-server"]
