"""Routers and workers accept calls only from each other: attacks over real sockets.

The server has a worker's interceptors and port, and methods that only answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.cluster.launch.certificates import Authority
from tandem.net.rpc.auth import KindInterceptor, TokenInterceptor
from tandem.net.rpc.certificates import CertificateFiles
from tandem.net.rpc.failures import FailureInterceptor
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.peer_calls import PeerCalls, add_port
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from tests.harness.waiting import eventually

CLUSTER = "c1"
TOKEN = "a-token-that-must-not-leak"
BODY_BYTES = 60_000_000


class Answers(WorkerServicer):
    """Answers a router's call and a worker's call."""

    async def SetRole(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.SetRoleResponse(role=request.role[:10])

    async def Probe(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for _ in range(request.num_bytes):
            yield pb.BlockBytes(data=b"x")


@asynccontextmanager
async def worker(tls_dir: Path | None) -> AsyncIterator[str]:
    server = grpc.aio.server(
        interceptors=[
            TokenInterceptor(TOKEN),
            *([KindInterceptor(CLUSTER)] if tls_dir else []),
            FailureInterceptor(),
        ],
        options=SERVER_OPTIONS,
    )
    add_WorkerServicer_to_server(Answers(), server)
    files = CertificateFiles.in_folder(str(tls_dir)) if tls_dir else None
    port = add_port(server, "127.0.0.1:0", files)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def as_router(address: str, calls: PeerCalls, role: str = "decode") -> str:
    """Makes a router's call. Returns the answer, or the status that refused it."""
    async with calls.open(address) as channel:
        try:
            request = pb.SetRoleRequest(role=role)
            call = WorkerStub(channel).SetRole(request, metadata=calls.metadata, timeout=10)
            return str((await call).role)
        except grpc.aio.AioRpcError as error:
            return error.code().name


async def as_worker(address: str, calls: PeerCalls) -> str:
    """Makes a worker's call. Returns the answer, or the status that refused it."""
    async with calls.open(address) as channel:
        try:
            request = pb.ProbeRequest(num_bytes=3)
            call = WorkerStub(channel).Probe(request, metadata=calls.metadata, timeout=10)
            return "".join([message.data.decode() async for message in call])
        except grpc.aio.AioRpcError as error:
            return error.code().name


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Folders of certificates for each kind, and of another cluster and another authority."""
    ours = Authority(CLUSTER)
    for kind in ("router", "worker", "controller"):
        ours.write(tmp_path / kind, kind)  # type: ignore[arg-type]
    # They trust our authority, like an attacker would.
    Authority(CLUSTER).write(tmp_path / "foreign", "router", roots=ours.pem)
    other_cluster = Authority("c2")
    for name in ("_key", "_key_id", "_name"):
        setattr(other_cluster, name, getattr(ours, name))
    other_cluster.write(tmp_path / "other-cluster", "router", roots=ours.pem)
    return tmp_path


def peer(folder: Path | None) -> PeerCalls:
    return PeerCalls(CLUSTER, TOKEN, str(folder) if folder else "")


async def test_each_kind_may_call_its_own_methods(certificates: Path) -> None:
    router, other = peer(certificates / "router"), peer(certificates / "worker")
    async with worker(certificates / "worker") as address:
        assert await as_router(address, router) == "decode"
        assert await as_worker(address, other) == "xxx"
        assert await as_worker(address, router) == "PERMISSION_DENIED"
        assert await as_router(address, other) == "PERMISSION_DENIED"


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_channel_tells_its_state(certificates: Path, encrypted: bool) -> None:
    calls = peer(certificates / "router" if encrypted else None)
    async with worker(certificates / "worker" if encrypted else None) as address:
        channel = calls.open(address)
        await asyncio.wait_for(channel.channel_ready(), 10)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await channel.close()
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize(
    ("folder", "status"),
    [
        ("controller", "PERMISSION_DENIED"),
        ("other-cluster", "PERMISSION_DENIED"),
        ("foreign", "UNAVAILABLE"),
        (None, "UNAVAILABLE"),
    ],
)
async def test_a_wrong_certificate_gets_nothing(
    certificates: Path, folder: str | None, status: str
) -> None:
    calls = peer(certificates / folder if folder else None)
    async with worker(certificates / "worker") as address:
        assert await as_router(address, calls) == status
        assert await as_worker(address, calls) == status


async def test_tls_without_a_client_certificate_gets_nothing(certificates: Path) -> None:
    credentials = grpc.ssl_channel_credentials((certificates / "router/ca.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", f"worker.{CLUSTER}.tandem")]
    calls = peer(None)
    calls.open = lambda address: grpc.aio.secure_channel(  # type: ignore[method-assign]
        address, credentials, options
    )
    async with worker(certificates / "worker") as address:
        assert await as_router(address, calls) == "UNAVAILABLE"


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handle, context: ssl.SSLContext | None) -> AsyncIterator[str]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)  # type: ignore[arg-type]
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("server", ["clear", "foreign", "router", "other-cluster"])
async def test_the_token_goes_to_no_false_worker(certificates: Path, server: str) -> None:
    """A listening socket records all bytes that it receives, decrypted if it has a certificate."""
    got: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Acts as an HTTP/2 server that has finished its handshake; gRPC sends no headers before
        # that.
        writer.write(bytes.fromhex("000000040000000000"))
        try:
            while data := await reader.read(65536):
                got.append(data)
        except OSError:
            pass
        finally:
            writer.close()

    context = None
    if server != "clear":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        folder = certificates / server
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.set_alpn_protocols(["h2"])
    async with listening(record, context) as address:
        assert await as_router(address, peer(certificates / "router")) == "UNAVAILABLE"
        assert TOKEN.encode() not in b"".join(got)
        # without certificates the token is sent, which shows that the socket records
        if server == "clear":
            task = asyncio.create_task(as_router(address, peer(None)))
            await eventually(lambda: TOKEN.encode() in b"".join(got))
            task.cancel()
        else:
            assert not got  # not even encrypted bytes were sent


@pytest.mark.parametrize("encrypted", [False, True])
async def test_the_body_of_a_stranger_is_not_read(certificates: Path, encrypted: bool) -> None:
    """Sends 60 MB without the token: the worker reads only a few flow-control windows."""
    num_taken = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_taken
        host, port = address.split(":")
        to_reader, to_writer = await asyncio.open_connection(host, int(port))

        async def back() -> None:
            while data := await to_reader.read(1 << 16):
                writer.write(data)
            writer.close()

        answering = asyncio.create_task(back())
        try:
            while data := await reader.read(1 << 16):
                num_taken += len(data)
                to_writer.write(data)
                await to_writer.drain()
        except OSError:
            pass
        finally:
            to_writer.close()
            await asyncio.wait([answering])

    folder = certificates / "router" if encrypted else None
    stranger = PeerCalls(CLUSTER, "a guess", str(folder or ""))
    async with (
        worker(certificates / "worker" if encrypted else None) as address,
        listening(forward, None) as through,
    ):
        assert await as_router(through, stranger, "x" * BODY_BYTES) == "UNAUTHENTICATED"
        assert num_taken < BODY_BYTES / 10
        # The same message from a router is read.
        num_taken = 0
        assert await as_router(through, peer(folder), "x" * BODY_BYTES) == "xxxxxxxxxx"
        assert num_taken > BODY_BYTES


async def test_calls_move_to_new_certificates_and_streams_end_on_the_old_ones(
    certificates: Path,
) -> None:
    calls = peer(certificates / "worker")
    async with worker(certificates / "worker") as address, calls.open(address) as channel:
        stub = WorkerStub(channel)
        request = pb.ProbeRequest(num_bytes=100_000)
        stream = aiter(stub.Probe(request, metadata=calls.metadata, timeout=30))
        assert (await anext(stream)).data == b"x"
        other = Authority(CLUSTER)
        other.write(certificates / "worker", "worker")
        request = pb.ProbeRequest(num_bytes=1)
        answer = stub.Probe(request, metadata=calls.metadata, timeout=10)
        assert [message.data async for message in answer] == [b"x"]
        assert sum([len(message.data) async for message in stream]) == 99_999
        # Clients that trust only the old root are refused now.
        assert await as_router(address, peer(certificates / "router")) == "UNAVAILABLE"
