"""Targets that get inputs by sockets: a router's HTTP and gRPC ports and Redis, and a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio
import httpx

from tandem.net.rpc.auth import token_metadata
from tandem.net.store.client import connect_blocking
from tests.security.fuzz.examples import BODIES, ROUTER_CALLS, WORKER_CALLS
from tests.security.fuzz.inputs import Bytes, OneOf, Source
from tests.security.fuzz.parser_targets import Records, body_source
from tests.security.fuzz.served import DEADLINE_S, Served

_HEAD = b"%s %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class SocketTarget(Protocol):
    """A process that reads inputs from `at_once` clients. `check` raises for an input that does
    harm."""

    source: Source[Any]
    at_once: int
    rss_bytes: Callable[[], int]

    async def check(self, value: Any) -> None: ...

    async def close(self) -> None: ...


def _raw_requests() -> list[bytes]:
    found = [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2]
    for path in ("/v1/completions", "/v1/chat/completions"):
        text = httpx.Request("POST", "http://x", json=BODIES[path]).content
        head = _HEAD % (b"POST", path.encode())
        found.append(head + b"content-length: %d\r\n\r\n%s" % (len(text), text))
        chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
        found.append(head + chunked)
    for path in ("models", "requests/x", "usage", "keys/records"):
        more = b"authorization: Bearer tandem-a-b\r\nx-forwarded-for: 1.2.3.4\r\n\r\n"
        found.append(_HEAD % (b"GET", f"/v1/{path}".encode()) + more)
    return found


class RawHttp:
    """Raw bytes, each input on its own connection, which the client half-closes."""

    at_once = 32

    def __init__(self, served: Served) -> None:
        self.source = Bytes(_raw_requests())
        self.rss_bytes = served.router_bytes
        self._port = served.http_port

    async def check(self, value: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            answer = b""
            try:
                writer.write(value)
                writer.write_eof()
                answer = await reader.read()
            except ConnectionError:
                pass  # the connection was closed with unread bytes
            finally:
                writer.transport.abort()
        assert b"HTTP/1.1 5" not in answer, answer

    async def close(self) -> None:
        pass


class HttpBodies:
    """Bodies on keep-alive connections. A client library would take longer than the router."""

    at_once = 32

    def __init__(self, served: Served) -> None:
        self.source = body_source()
        self.rss_bytes = served.router_bytes
        self._port = served.http_port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def check(self, value: tuple[str, bytes]) -> None:
        name, body = value
        head = _HEAD % (b"POST", name.partition("#")[0].encode())
        async with asyncio.timeout(DEADLINE_S):
            if not self._idle:
                self._idle.append(await asyncio.open_connection("127.0.0.1", self._port))
            reader, writer = connection = self._idle.pop()
            writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            status, answer = await _read_answer(reader)
        assert status < 500, answer
        self._idle.append(connection)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Reads the status and the body, which may be chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, has_length, after = head.partition(b"content-length: ")
    if has_length:
        answer = await reader.readexactly(int(after.partition(b"\r\n")[0]))
    else:
        assert b"transfer-encoding: chunked" in head, head
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(head.split()[1]), answer


def _calls(calls: dict[str, list[Any]]) -> OneOf:
    wholes = {name: [m.SerializeToString() for m in given] for name, given in calls.items()}
    return OneOf({name: Bytes(given) for name, given in wholes.items()})


async def _code(
    channel: grpc.aio.Channel, method: str, body: bytes, **options: Any
) -> tuple[str, str]:
    # On the wire a single message equals a stream of one message.
    call = channel.unary_stream(method)(body, **options)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


class RouterCalls:
    """Bytes as the message of each method of a router's public and admin ports."""

    at_once = 32

    def __init__(self, served: Served) -> None:
        self.source = _calls(ROUTER_CALLS)
        self.rss_bytes = served.router_bytes
        self._public = grpc.aio.insecure_channel(served.grpc_address)
        self._admin = grpc.aio.insecure_channel(served.admin_grpc_address)

    async def check(self, value: tuple[str, bytes]) -> None:
        method, body = value
        channel = self._admin if "Cluster" in method else self._public
        code, details = await _code(channel, method, body, timeout=DEADLINE_S)
        bad = {"INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"}
        if "reflection" not in method:  # gRPC parses the messages of its own streams itself
            bad.add("UNKNOWN")
        assert code not in bad, (code, details)

    async def close(self) -> None:
        await self._public.close()
        await self._admin.close()


class WorkerCalls:
    """Bytes as the message of each method of a worker's port; one in 20 without the token."""

    at_once = 32
    _PATIENCE_S = 0.1  # time limit for calls that may rightly stay open
    _STAY_OPEN = ("Decode", "Prefill")

    def __init__(self, served: Served) -> None:
        self.source = _calls(WORKER_CALLS)
        self.rss_bytes = served.worker_bytes
        self._token = token_metadata(served.worker.token)
        self._channel = grpc.aio.insecure_channel(served.worker.address)

    async def check(self, value: tuple[str, bytes]) -> None:
        method, body = value
        has_token = sum(body) % 20 > 0
        deadline_s = self._PATIENCE_S if method in self._STAY_OPEN else DEADLINE_S
        code, details = await _code(
            self._channel,
            f"/tandem.v1.Worker/{method}",
            body,
            timeout=deadline_s,
            metadata=self._token if has_token else None,
        )
        bad = {"INTERNAL", "DATA_LOSS", "UNKNOWN"}
        if method not in self._STAY_OPEN:
            bad.add("DEADLINE_EXCEEDED")
        assert code not in bad, (code, details)
        assert has_token or code in ("UNAUTHENTICATED", "DEADLINE_EXCEEDED"), code

    async def close(self) -> None:
        await self._channel.close()


class RedisRecords:
    """Records of workers and keys, and entries of the prefix tree, in the Redis of a router.

    The router reads them within a second; calls that use them are made for 200 of them at a time.
    """

    at_once = 1
    _TOGETHER = 200

    def __init__(self, served: Served) -> None:
        self.source = Records().source
        self.rss_bytes = served.router_bytes
        self._served = served
        self._redis = connect_blocking(served.config.redis_url)
        self._num_written = 0

    async def check(self, value: tuple[str, bytes]) -> None:
        kind, data = value
        self._num_written += 1
        slot = self._num_written % self._TOGETHER
        name = f"fuzz-{slot}"
        cluster = self._served.config.cluster_id
        prefix = f"{{tandem:{cluster}}}"
        if kind == "worker":
            self._redis.set(f"{prefix}:worker:{name}", data, px=3000)
            self._redis.sadd(f"{prefix}:workers", name)
        elif kind == "key":
            self._redis.hset(f"{prefix}:keys", name, data)
            self._redis.incr(f"{prefix}:keys:changes")
        else:
            tree = f"{{tandem:{cluster}:0}}:prefix"
            self._redis.hset(tree, ["slot:fuzz", "live", "worker:1", "next"][slot % 4], data)
        if slot == 0:
            await self._ask()

    async def _ask(self) -> None:
        """Makes calls that use the records, and then removes the records."""
        served = self._served
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            for url in (f"{served.admin_url}/v1/cluster", f"{served.admin_url}/metrics"):
                answer = await client.get(url)
                assert answer.status_code == 200, (url, answer.text)
            body = BODIES["/v1/completions"]
            answer = await client.post(f"{served.url}/v1/completions", json=body)
            assert answer.status_code < 500, answer.text
        cluster = served.config.cluster_id
        self._redis.delete(f"{{tandem:{cluster}:0}}:prefix", f"{{tandem:{cluster}}}:keys")

    async def close(self) -> None:
        self._redis.close()
