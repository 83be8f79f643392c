"""`Upgrade` is ignored: the request is answered, and its body is never parsed as another request.

RFC 9110 7.8 lets a server ignore the field. A proxy that forwards it treats the bytes after the
header as the request's body. A server that treated them as requests would answer one client's
request to another client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.harness.cluster import free_port
from tests.harness.scripted_worker import saying
from tests.harness.waiting import eventually
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

HIDDEN = b"GET /v1/models?hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 3}'
UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "unknown": b"upgrade: foo/2, bar\r\nconnection: upgrade\r\n",
    "casing": b"CONNECTION: uPgRaDe\r\nuPGRADE: H2C\r\n",
    "whitespace": b"Connection:keep-alive ,\t Upgrade \t\r\nUpgrade:  \t h2c \t\r\n",
    "several": b"Connection: keep-alive\r\nUpgrade: a\r\nConnection: upgrade\r\nUpgrade: b\r\n",
    "empty": b"Connection: upgrade\r\nUpgrade: \r\n",
    "without-connection": b"Upgrade: h2c\r\n",
    "without-upgrade": b"Connection: Upgrade\r\n",
    "expect": b"Connection: Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n",
}


class Client:
    """One connection; every wait for the router in its context is limited to 10 s."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *packets: bytes) -> None:
        """Sends each packet separately: the router reads one before the next is sent."""
        for packet in packets:
            self._writer.write(packet)
            await self._writer.drain()
            await asyncio.sleep(0.002)  # otherwise the kernel merges the packets

    async def answer(self) -> tuple[int, bytes]:
        """Reads status and body of the next answer."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 "):
            return await self.answer()
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length, head
        return int(head.split(b" ")[1]), await self._reader.readexactly(int(length[1]))

    async def rest(self) -> bytes:
        """Reads everything until the router closes the connection."""
        rest = b""
        with contextlib.suppress(ConnectionError):
            while part := await self._reader.read(1 << 16):
                rest += part
        return rest


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            yield Client(reader, writer)
    finally:
        writer.close()


def head(
    fields: bytes, *, size: int | None = None, line: bytes = b"POST /v1/completions HTTP/1.1"
) -> bytes:
    framing = b"transfer-encoding: chunked" if size is None else b"content-length: %d" % size
    common = b"\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return line + common + fields + framing + b"\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def each_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def deliveries(fields: bytes, body: bytes) -> dict[str, Iterable[bytes]]:
    """The same request, split into packets in several ways, by name."""
    by_length, by_chunks = head(fields, size=len(body)), head(fields)
    pieces = chunked(body[:5], body[5:])
    return {
        "one packet": [by_length + body],
        "a later packet": [by_length, body],
        "two later packets": [by_length, body[:7], body[7:]],
        "chunked in one packet": [by_chunks + pieces],
        "chunked in a later packet": [by_chunks, pieces],
        "header cut": [by_length[:-3], by_length[-3:] + body[:4], body[4:]],
    }


@pytest.fixture
def answering(router: RunningRouter) -> RunningRouter:
    router.script(saying([5, 6, 7], finish_reason="length"))
    return router


@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_the_request_is_answered_with_its_body_and_so_is_the_next(
    answering: RunningRouter, upgrade: str
) -> None:
    for name, packets in deliveries(UPGRADES[upgrade], BODY).items():
        async with connected(answering.router.http_port) as client:
            for _ in range(2):
                await client.send(*packets)
                status, body = await client.answer()
                assert status == 200, (name, body)
                assert json.loads(body)["usage"]["completion_tokens"] == 3, name
            await client.send(HIDDEN)
            assert b'"object":"list"' in (await client.answer())[1], name


@pytest.mark.parametrize("method", [b"POST /v1/completions", b"GET /health", b"HEAD /health"])
@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_a_body_is_never_a_request(
    answering: RunningRouter, upgrade: str, method: bytes
) -> None:
    """The last request closes the connection, so all answers are counted."""
    fields = UPGRADES[upgrade]
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    for port in (answering.router.http_port, answering.router.admin.http_port):
        if port != answering.router.http_port and method.startswith(b"POST"):
            continue
        line = method + b" HTTP/1.1"
        by_length, by_chunks = head(fields, size=len(HIDDEN), line=line), head(fields, line=line)
        for packets in (
            [by_length + HIDDEN + last],
            [by_length, HIDDEN, last],
            [by_chunks + chunked(HIDDEN) + last],
            [by_chunks, chunked(HIDDEN), last],
        ):
            async with connected(port) as client:
                await client.send(*packets)
                told = (await client.rest()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            assert told.count(b"HTTP/1.1 ") == 2, (packets, told)
            assert b'"object":"list"' not in told, packets


async def test_a_request_that_comes_byte_by_byte_is_answered(answering: RunningRouter) -> None:
    async with connected(answering.router.http_port) as client:
        await client.send(*each_byte(head(UPGRADES["h2c"], size=len(BODY)) + BODY))
        assert (await client.answer())[0] == 200
        await client.send(HIDDEN)
        assert (await client.answer())[0] == 200


async def test_requests_behind_it_are_answered_in_turn(answering: RunningRouter) -> None:
    plain = head(b"", size=len(BODY)) + BODY
    upgrading = head(UPGRADES["websocket"], size=len(BODY)) + BODY
    without_body = b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + UPGRADES["h2c"] + b"\r\n"
    async with connected(answering.router.http_port) as client:
        await client.send(plain + upgrading + without_body * 2 + upgrading + plain + HIDDEN)
        answers = [await client.answer() for _ in range(7)]
    assert [status for status, _ in answers] == [200] * 7
    is_generated = [b"completion_tokens" in body for _, body in answers]
    assert is_generated == [True, True, False, False, True, True, False]


async def test_http_1_0_closes_after_the_answer(answering: RunningRouter) -> None:
    line = b"POST /v1/completions HTTP/1.0"
    sent = head(UPGRADES["h2c"], size=len(BODY), line=line) + BODY
    for packets in ([sent + HIDDEN], each_byte(sent)):
        async with connected(answering.router.http_port) as client:
            await client.send(*packets)
            told = await client.rest()
        assert told.count(b"HTTP/1.1 ") == 1
        assert told.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("target", [b"localhost:443", b"/v1/models", b"http://localhost/v1/models"])
@pytest.mark.parametrize("upgrade", ["h2c", "without-upgrade"])
async def test_a_tunnel_is_refused_and_its_bytes_are_no_request(
    answering: RunningRouter, target: bytes, upgrade: str
) -> None:
    begin = head(UPGRADES[upgrade], size=len(HIDDEN), line=b"CONNECT " + target + b" HTTP/1.1")
    for packets in ([begin + HIDDEN], [begin, HIDDEN]):
        async with connected(answering.router.http_port) as client:
            # the connection may be closed before the second packet
            with contextlib.suppress(ConnectionError):
                await client.send(*packets)
            told = await client.rest()
        assert told.count(b"HTTP/1.1 ") == 1, told
        assert told.startswith(b"HTTP/1.1 400 "), told
        assert b"connection: close" in told


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"content-length: 5\r\n", 400),  # a second Content-Length with another value
        (b"content-length: 49\r\n", 400),
        (b"transfer-encoding: chunked\r\n", 400),  # both framings
        (b"transfer-encoding: gzip, identity\r\n", 400),
        (b"x: a\r\n content-length: 0\r\n", 400),  # a folded line
        (b"x: a\nb: c\r\n", 400),  # a bare line feed
        (b"x: a\rb: c\r\n", 400),
        (b"x: a\0b\r\n", 400),
        (b"content-length : 0\r\n", 400),
        (b"transfer-encoding\x0b: chunked\r\n", 400),
        (b"x y: z\r\n", 400),
        (b": z\r\n", 400),
    ],
)
async def test_a_header_that_two_servers_could_read_differently_is_refused(
    answering: RunningRouter, fields: bytes, status: int
) -> None:
    for upgrade in (b"", UPGRADES["h2c"]):
        for given in (upgrade + fields, fields + upgrade):
            async with connected(answering.router.http_port) as client:
                await client.send(head(given, size=len(HIDDEN)) + HIDDEN)
                told = await client.rest()
            assert told.count(b"HTTP/1.1 ") == 1, (given, told)
            assert told.startswith(b"HTTP/1.1 %d " % status), (given, told)


async def test_fields_after_the_body_are_none_of_the_request(answering: RunningRouter) -> None:
    """A pipelined request waits for the previous one while its trailers arrive."""
    sent = head(b"") + chunked(BODY)[:-2] + b"host: evil.example\r\nupgrade: h2c\r\n"
    async with connected(answering.router.http_port) as client:
        await client.send((sent + b"connection: upgrade\r\n\r\n") * 2 + HIDDEN)
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3
    async with connected(answering.router.http_port) as client:
        await client.send(sent + b"connection: close\r\n\r\n" + HIDDEN)
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 1


NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_buffer_size 1m;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream router {{ server 127.0.0.1:{router}; keepalive 1; }}
  server {{ listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://router; proxy_http_version 1.1; proxy_set_header Host $host;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
      proxy_request_buffering {buffering};
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, router_port: int, buffering: str) -> Iterator[int]:
    """Runs nginx configured like ingress-nginx. Yields its port."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, port=port, router=router_port, buffering=buffering))
    process = subprocess.Popen([program, "-p", folder, "-e", folder / "errors", "-c", file])
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("buffering", ["on", "off"])
async def test_no_client_of_a_proxy_gets_another_ones_answer(
    answering: RunningRouter, tmp_path: Path, buffering: str
) -> None:
    hidden = head(b"", size=len(BODY)) + BODY
    with nginx(tmp_path, answering.router.http_port, buffering) as port:
        await eventually(lambda: (tmp_path / "pid").exists())  # nginx is listening
        for padding in (0, 2_000, 17_000, 60_000):
            body = b"\r\n" * (padding // 2) + hidden
            line = b"GET /version HTTP/1.1"
            begin = head(UPGRADES["unknown"], size=len(body), line=line)
            for _ in range(5):
                async with connected(port) as attacker, connected(port) as victim:
                    await attacker.send(begin, body)
                    await victim.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    assert "version" in json.loads((await attacker.answer())[1])
                    _, told = await victim.answer()
                    assert json.loads(told)["object"] == "list", padding
    assert not answering.submitted
