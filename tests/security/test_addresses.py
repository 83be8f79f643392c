"""Limits for each client address, and X-Forwarded-For, which only trusted proxies may set."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import httpx
import pytest

from tandem.common.config.router import AddressConfig
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import silent
from tests.harness.slow_clients import KINDS
from tests.harness.waiting import eventually
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

CONNECTIONS = 4
REQUESTS = 2
PROXY = "127.0.0.9"
CLIENT = "127.0.0.2"
OTHER = "127.0.0.3"
ROUTER = {
    "connections_max": 3 * CONNECTIONS,
    "addresses": AddressConfig(
        trusted_proxies=(PROXY,),
        connections_per_address=CONNECTIONS,
        requests_per_address=REQUESTS,
    ),
}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = {"prompt": "x", "max_tokens": 1}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(port: int, address: str, number: int = 1) -> AsyncIterator[list[Streams]]:
    """Opens connections from an address of this machine."""
    made: list[Streams] = []
    try:
        for _ in range(number):
            made.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
        yield made
    finally:
        for _, writer in made:
            writer.close()
        for _, writer in made:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def answer(streams: Streams, sent: bytes) -> bytes:
    """Reads a response with a Content-Length."""
    reader, writer = streams
    writer.write(sent)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length, head
        return head + await reader.readexactly(int(length[1]))


def client(router: RunningRouter, address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{router.router.http_port}",
        transport=httpx.AsyncHTTPTransport(local_address=address),
        timeout=20,
    )


async def test_an_address_cannot_take_all_connections(router: RunningRouter) -> None:
    port = router.router.http_port
    part = b"GET /health HTTP/1.1\r\n"
    async with connected(port, CLIENT, CONNECTIONS) as held:
        for _, writer in held:
            writer.write(part)
        async with connected(port, CLIENT) as (late,):
            async with asyncio.timeout(10):
                refusal = await late[0].read()
            head, _, body = refusal.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            error = json.loads(body)["error"]
            assert error["code"] == "too_many_connections"
            assert "your address" in error["message"]
        async with connected(port, OTHER, CONNECTIONS) as others:
            for streams in others:
                assert (await answer(streams, HEALTH)).startswith(b"HTTP/1.1 200 ")
        for streams in held:  # connections that were accepted before stay open
            rest = HEALTH.removeprefix(part)
            assert (await answer(streams, rest)).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_of_the_same_address_gives_way(router: RunningRouter) -> None:
    port = router.router.http_port
    async with (
        connected(port, OTHER) as (other,),
        connected(port, CLIENT, CONNECTIONS) as held,
    ):
        for streams in (other, *held):
            assert (await answer(streams, HEALTH)).startswith(b"HTTP/1.1 200 ")
        async with connected(port, CLIENT) as (late,):
            assert (await answer(late, HEALTH)).startswith(b"HTTP/1.1 200 ")
        assert (await answer(other, HEALTH)).startswith(b"HTTP/1.1 200 ")
        async with asyncio.timeout(10):
            await held[0][0].read()
            assert held[0][0].at_eof()


async def test_at_a_full_router_the_address_with_the_most_gives_way(router: RunningRouter) -> None:
    """The proxy has no own limit, and its connections are replaced last."""
    port = router.router.http_port
    async with (
        connected(port, PROXY, 2 * CONNECTIONS - 1) as proxied,
        connected(port, CLIENT, CONNECTIONS) as held,
    ):
        for streams in (*proxied, *held):
            assert (await answer(streams, HEALTH)).startswith(b"HTTP/1.1 200 ")
        async with connected(port, OTHER, 2) as others:
            for streams in others:
                assert (await answer(streams, HEALTH)).startswith(b"HTTP/1.1 200 ")
            async with asyncio.timeout(10):
                await held[0][0].read()
        for streams in proxied:
            assert (await answer(streams, HEALTH)).startswith(b"HTTP/1.1 200 ")


async def test_unanswered_requests_of_an_address_are_bounded(router: RunningRouter) -> None:
    router.script(silent)
    async with client(router, CLIENT) as http, client(router, OTHER) as other:
        asking = [
            asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(REQUESTS)
        ]
        await eventually(lambda: len(router.submitted) == REQUESTS)
        forged = {"x-forwarded-for": "203.0.113.7"}
        refused = await http.post("/v1/completions", json=BODY, headers=forged)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("too_many_requests", "rate_limit_error")
        assert (await http.get("/health")).status_code == 200  # probes are exempt
        asking.append(asyncio.create_task(other.post("/v1/completions", json=BODY)))
        await eventually(lambda: len(router.submitted) == REQUESTS + 1)
        # gRPC calls of the same address count towards the same limit.
        local = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{router.router.grpc_port}", options=local
        ) as channel:
            asking += [asyncio.create_task(http_of_loopback(router)) for _ in range(REQUESTS)]
            await eventually(lambda: len(router.submitted) == 2 * REQUESTS + 1)
            call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as over:
                await call.read()
            assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(over.value.trailing_metadata() or ())
            assert trailers["tandem-code"] == "too_many_requests"
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    await eventually(lambda: not router.router._access.clients._num_requests)


async def http_of_loopback(router: RunningRouter) -> None:
    await router.http.post("/v1/completions", json=BODY)


async def test_a_trusted_proxy_names_its_clients(router: RunningRouter) -> None:
    router.script(silent)
    async with client(router, PROXY) as proxy:
        asking = []
        for number in range(3):
            headers = {"x-forwarded-for": f"6.6.6.6, 203.0.113.{number}"}
            asking += [
                asyncio.create_task(proxy.post("/v1/completions", json=BODY, headers=headers))
                for _ in range(REQUESTS)
            ]
        await eventually(lambda: len(router.submitted) == 3 * REQUESTS)
        headers = {"x-forwarded-for": "9.9.9.9, 203.0.113.2"}
        refused = await proxy.post("/v1/completions", json=BODY, headers=headers)
        assert refused.status_code == 429
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_an_address_cannot_take_all_grpc_connections(router: RunningRouter) -> None:
    port = router.router.grpc_port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = InferenceStub(channel)
        await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        async with connected(port, CLIENT, 2 * CONNECTIONS) as held:
            for _, writer in held:
                writer.write(KINDS["grpc-idle"].begin)

            async def ended(streams: Streams) -> None:
                with contextlib.suppress(ConnectionError):
                    await streams[0].read()

            reading = [asyncio.create_task(ended(streams)) for streams in held]
            await eventually(lambda: sum(task.done() for task in reading) == CONNECTIONS)
            await stub.ListModels(pb.ListModelsRequest(), timeout=10)
            for task in reading:
                task.cancel()


async def test_a_client_that_pings_all_the_time_is_cut(router: RunningRouter) -> None:
    ping = bytes.fromhex("0000080600000000000000000000000000")
    async with connected(router.router.grpc_port, CLIENT) as ((reader, writer),):
        writer.write(KINDS["grpc-idle"].begin + ping * 20)
        async with asyncio.timeout(10):
            seen = await reader.read()
    assert b"too_many_pings" in seen


async def test_a_connection_has_a_bound_on_calls_at_once(router: RunningRouter) -> None:
    async with connected(router.router.grpc_port, CLIENT) as ((reader, writer),):
        writer.write(KINDS["grpc-idle"].begin)
        async with asyncio.timeout(10):
            head = await reader.readexactly(9)
            settings = await reader.readexactly(int.from_bytes(head[:3]))
    found = {
        int.from_bytes(settings[at : at + 2]): int.from_bytes(settings[at + 2 : at + 6])
        for at in range(0, len(settings), 6)
    }
    assert found[3] == 1024  # MAX_CONCURRENT_STREAMS
    assert found[6] <= 16 << 10  # MAX_HEADER_LIST_SIZE
