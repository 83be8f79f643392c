"""The cost of one connection is bounded: raw bytes over real sockets, against the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from tandem.api.http.server import BoundedProtocol
from tandem.net.rpc.tandem.v1.inference_pb2 import ListModelsRequest
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.net.rpc.tandem.v1.worker_pb2 import SubmitSequence
from tests.harness.scripted_worker import Say, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

HEADER_BYTES_MAX = 64 << 10
CONNECTIONS_MAX = 8
ROUTER = {
    "header_deadline_s": 0.4,
    "body_deadline_s": 0.4,
    "keep_alive_s": 0.4,
    "connections_max": CONNECTIONS_MAX,
}
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"
PIECE = b"x" * 65_536

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(router: RunningRouter) -> AsyncIterator[Streams]:
    """Whatever waits inside for the server fails after 10 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(router: RunningRouter, sent: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    async with connected(router) as (reader, writer):
        writer.write(sent)
        return await reader.read()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next answer, which has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length, head
    return int(head.split(b" ")[1]), await reader.readexactly(int(length[1]))


def get(*fields: bytes, size: int = 0) -> bytes:
    """A request for /health with these fields; `size`: filled up to so many bytes."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"".join(fields)
    if size:
        head += b"x-fill: " + b"f" * (size - len(head) - len(b"x-fill: \r\n\r\n")) + b"\r\n"
    return head + b"\r\n"


def refused(answer: bytes) -> tuple[int, str]:
    """Status and code of a refusal, whose connection closes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


async def drip(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Sends the piece again and again, until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)


async def dripped(router: RunningRouter, begin: bytes, piece: bytes) -> bytes:
    """Returns the answer. What is still sent after it may reset the connection, not end it."""
    answer = b""
    async with connected(router) as (reader, writer):
        writer.write(begin)
        dripping = asyncio.create_task(drip(writer, piece))
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                answer += part
        dripping.cancel()
    return answer


async def test_a_header_has_a_size(router: RunningRouter) -> None:
    async with connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(get(size=HEADER_BYTES_MAX))
            assert (await answer_of(reader))[0] == 200
        writer.write(get(size=HEADER_BYTES_MAX + 1))
        assert refused(await reader.read()) == (431, "header_too_large")
    assert await healthy(router)


@pytest.mark.parametrize("upgrade", [b"", UPGRADE])
async def test_a_header_has_a_number_of_fields(router: RunningRouter, upgrade: bytes) -> None:
    num = 100 - 1 - upgrade.count(b"\n")  # beside `host`
    async with connected(router) as (reader, writer):
        writer.write(get(upgrade, *[b"a: b\r\n"] * num))
        assert (await answer_of(reader))[0] == 200
    answer = await exchange(router, get(upgrade, *[b"a: b\r\n"] * (num + 1)))
    assert refused(answer) == (431, "too_many_headers")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nx: ",
        b"GET /",
        b"GET /health HTTP/1.1\r\n" + UPGRADE + b"x: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nx: ",  # a field after the body
    ],
)
async def test_a_header_that_does_not_end_is_not_read_on(
    router: RunningRouter, begin: bytes
) -> None:
    num_sent = 0
    async with connected(router) as (reader, writer):
        writer.write(begin)
        answer = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            while num_sent < 100 << 20 and not answer.done():
                writer.write(PIECE)
                await writer.drain()
                num_sent += len(PIECE)
        assert refused(await answer) == (431, "header_too_large")
    assert num_sent < 16 << 20  # what the system buffers on both sides
    assert await healthy(router)


async def test_a_connection_that_sends_nothing_is_closed(router: RunningRouter) -> None:
    assert await exchange(router, b"") == b""


async def test_a_connection_is_closed_some_time_after_its_answer(router: RunningRouter) -> None:
    assert (await exchange(router, GET)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begin", [b"GET", GET[:-1]])
async def test_a_header_that_stops_is_late(router: RunningRouter, begin: bytes) -> None:
    assert refused(await exchange(router, begin)) == (408, "header_too_late")


async def test_a_header_that_drips_wakes_the_router_a_few_times(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    received = BoundedProtocol.data_received

    def noted(protocol: BoundedProtocol, data: bytes) -> None:
        sizes.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", noted)
    async with connected(router) as (reader, writer):
        for byte in GET:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.002)  # else the kernel joins them
        assert (await answer_of(reader))[0] == 200
    assert sum(sizes) == len(GET)
    assert len(sizes) <= len(GET) // 2


async def test_a_header_that_drips_is_late(router: RunningRouter) -> None:
    answer = await dripped(router, b"GET /health HTTP/1.1\r\n", b"a: b\r\n")
    assert refused(answer) == (408, "header_too_late")
    second = await dripped(router, GET, b"\r\n")  # blank lines before a next request
    assert second.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("framing", [b"content-length: 100000", b"transfer-encoding: chunked"])
async def test_a_body_that_drips_is_late(router: RunningRouter, framing: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + framing + b"\r\n\r\n"
    piece = b" " if b"length" in framing else b"1\r\n \r\n"
    assert refused(await dripped(router, head, piece)) == (408, "body_too_late")


async def test_a_body_that_nobody_reads_ends_with_its_connection(router: RunningRouter) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await dripped(router, head, b"1\r\n \r\n")).startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def streaming(router: RunningRouter) -> AsyncIterator[tuple[Streams, Callable[[], None]]]:
    """A stream that has begun on a connection of its own; the call has it go on to its end."""
    go_on = asyncio.Event()

    async def script(submit: SubmitSequence, say: Say) -> None:
        say(update(submit, [5]))
        await go_on.wait()
        say(update(submit, [6, 7], "length"))

    router.script(script)
    body = b'{"prompt": "x", "stream": true, "max_tokens": 3}'
    async with connected(router) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await reader.readuntil(b"data: ")
        yield (reader, writer), go_on.set


async def test_connections_over_the_number_are_refused_and_a_stream_goes_on(
    router: RunningRouter,
) -> None:
    async with streaming(router) as ((reader, _), go_on):
        answers = await asyncio.gather(
            *(exchange(router, b"GET /health") for _ in range(2 * CONNECTIONS_MAX))
        )
        statuses = [refused(answer)[0] for answer in answers]
        assert statuses.count(503) > 0
        assert set(statuses) <= {503, 408}  # those that are taken do not end their header
        go_on()
        assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
    async with asyncio.timeout(10):
        while not await healthy(router):
            pass


async def test_an_idle_connection_makes_room(router: RunningRouter) -> None:
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(2 * CONNECTIONS_MAX):
            reader, writer = await opened.enter_async_context(connected(router))
            writer.write(GET)
            assert (await answer_of(reader))[0] == 200


async def test_pipelined_requests_are_answered_in_turn(router: RunningRouter) -> None:
    async with connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(GET * 5)
            assert [(await answer_of(reader))[0] for _ in range(5)] == [200] * 5


@pytest.mark.parametrize(
    "after", [get(size=2 * HEADER_BYTES_MAX + 1), b"GET /heal", GET * 1000, b"\0", get(UPGRADE)]
)
async def test_what_follows_a_stream_does_not_break_it(router: RunningRouter, after: bytes) -> None:
    """Refused requests end the connection, after the answers to those that were taken."""
    async with streaming(router) as ((reader, writer), go_on):
        writer.write(after)
        assert await healthy(router)  # by then the server has read them
        go_on()
        stream, _, rest = (await reader.read()).partition(b"0\r\n\r\n")
        assert b"data: [DONE]" in stream
        assert rest.count(b"HTTP/1.1 200") <= 16


async def test_a_client_that_goes_after_a_pipelined_request_is_noticed(
    router: RunningRouter,
) -> None:
    async with streaming(router) as ((_, writer), _):
        writer.write(GET)
        assert await healthy(router)
    await eventually(lambda: len(router.cancelled) == 1)


async def test_a_grpc_connection_that_sends_nothing_is_closed(router: RunningRouter) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.router.grpc_port)
    async with asyncio.timeout(10):
        await reader.read()  # its settings, until it closes
    writer.close()


async def test_grpc_connections_over_the_number_are_closed(router: RunningRouter) -> None:
    port = router.router.grpc_port
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(CONNECTIONS_MAX):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OWN_CONNECTION)
            await opened.enter_async_context(channel)
            await InferenceStub(channel).ListModels(ListModelsRequest(), timeout=10)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(ROUTER["header_deadline_s"] / 2):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_grpc_metadata_have_a_size(router: RunningRouter) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.ListModels(ListModelsRequest(), metadata=(("x", "f" * (16 << 10)),))
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.ListModels(ListModelsRequest(), metadata=(("x", "f" * (15 << 10)),))


async def test_requests_are_served_after_all_that(router: RunningRouter) -> None:
    router.script(saying([5, 6, 7], finish_reason="length"))
    body = {"prompt": "x", "max_tokens": 3}
    assert (await router.http.post("/v1/completions", json=body)).status_code == 200


async def healthy(router: RunningRouter) -> bool:
    return (await router.http.get("/health")).status_code == 200


async def test_a_client_of_http_1_0_gets_no_chunks(router: RunningRouter) -> None:
    router.script(saying(router.tokenizer.encode("Hi!"), finish_reason="stop"))
    body = json.dumps({"prompt": "x", "max_tokens": 9, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    answer = await exchange(router, head % len(body) + body)
    begin, _, events = answer.partition(b"\r\n\r\n")
    assert begin.split()[1] == b"200", "no interim answer"
    assert b"transfer-encoding" not in begin.lower()
    assert b"connection: close" in begin
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    whole = await exchange(router, b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert b"content-length" in whole


@pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: localhost\r\n"])
async def test_a_request_names_its_host_once(router: RunningRouter, hosts: bytes) -> None:
    answer = await exchange(router, b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
    assert refused(answer) == (400, "invalid_request")
    assert b"Host" in answer
