"""The public ports with TLS, over real sockets, with certificates that change under load."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tandem.api.server import Router
from tandem.cluster.launch.certificates import Authority
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import AddressConfig, RouterConfig
from tandem.common.config.tls import PublicTls
from tandem.net.rpc.tandem.v1.inference_pb2 import ListModelsRequest
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.net.security import keys
from tandem.net.store.client import connect_blocking
from tests.harness.waiting import eventually
from tests.service.router.conftest import ANY_ADMIN_PORTS

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

NAME = "router.public.tandem"
HANDSHAKE_S = 0.5
CONNECTIONS_MAX = 8
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Encrypted:
    """A router in this process, and the folder with its certificate."""

    router: Router
    folder: Path
    cluster: ClusterConfig

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.router.http_port}"

    def context(self) -> ssl.SSLContext:
        """A TLS context that trusts the certificate's authority for the test address."""
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        context.check_hostname = False
        return context


def settings(cluster: ClusterConfig, folder: Path, name: str) -> RouterConfig:
    return RouterConfig(
        cluster=cluster,
        model="smollm2",
        router_id=name,
        http_port=0,
        admin=ANY_ADMIN_PORTS,
        grpc_port=0,
        drain_deadline_s=1.0,
        header_deadline_s=HANDSHAKE_S,
        connections_max=CONNECTIONS_MAX,
        addresses=AddressConfig(connections_per_address=CONNECTIONS_MAX),
        tls=PublicTls(tls_cert=str(folder / "tls.crt"), tls_key=str(folder / "tls.key")),
    )


@contextlib.asynccontextmanager
async def started(cluster: ClusterConfig, folder: Path, name: str) -> AsyncIterator[Encrypted]:
    router = Router(settings(cluster, folder, name))
    task = asyncio.create_task(router.run())
    await router.listening.wait()
    try:
        yield Encrypted(router, folder, cluster)
    finally:
        router.stop()
        await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encrypted(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Encrypted]:
    folder = tmp_path_factory.mktemp("tls")
    Authority("public").write(folder, "router")
    cluster = ClusterConfig(f"test-{uuid.uuid4().hex[:12]}", redis_server.url, "a-token-for-tests")
    async with started(cluster, folder, "r0") as running:
        yield running


def served(encrypted: Encrypted) -> bytes:
    """The certificate that a new connection gets."""
    text = ssl.get_server_certificate(("127.0.0.1", encrypted.router.http_port), timeout=5)
    return text.encode()


async def health(encrypted: Encrypted) -> int:
    async with httpx.AsyncClient(verify=encrypted.context(), timeout=10) as client:
        return (await client.get(f"{encrypted.url}/health")).status_code


async def list_models(encrypted: Encrypted) -> None:
    credentials = grpc.ssl_channel_credentials((encrypted.folder / "ca.crt").read_bytes())
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{encrypted.router.grpc_port}"
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        await InferenceStub(channel).ListModels(ListModelsRequest(), timeout=10)


async def test_both_ports_speak_tls(encrypted: Encrypted) -> None:
    assert await health(encrypted) == 200
    await list_models(encrypted)


async def test_a_request_sent_with_the_end_of_the_handshake_is_answered(
    encrypted: Encrypted,
) -> None:
    for _ in range(20):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", encrypted.router.http_port, ssl=encrypted.context()
        )
        writer.write(GET)
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_plain_http_is_closed_and_does_not_hang(encrypted: Encrypted) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", encrypted.router.http_port)
    writer.write(GET)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    assert b"HTTP/1.1" not in answer
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{encrypted.router.grpc_port}") as channel:
            await InferenceStub(channel).ListModels(ListModelsRequest(), timeout=5)


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
async def test_a_slow_handshake_ends(encrypted: Encrypted, port: str) -> None:
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", getattr(encrypted.router, port))
    writer.write(b"\x16\x03\x01")  # the first bytes of a handshake, and no more
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
    assert HANDSHAKE_S * 0.9 < time.monotonic() - began < HANDSHAKE_S + 3


async def test_slow_handshakes_hold_places_for_a_bounded_time(encrypted: Encrypted) -> None:
    slow = [
        await asyncio.open_connection("127.0.0.1", encrypted.router.http_port)
        for _ in range(CONNECTIONS_MAX)
    ]
    with pytest.raises(httpx.TransportError):  # all slots are taken
        await health(encrypted)
    began = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert await health(encrypted) == 200
                break
    assert time.monotonic() - began < HANDSHAKE_S + 3
    for _, writer in slow:
        writer.close()


async def test_two_certificates_under_load_fail_no_request(encrypted: Encrypted) -> None:
    num_answered = 0
    done = asyncio.Event()

    async def ask() -> None:
        nonlocal num_answered
        while not done.is_set():
            assert await health(encrypted) == 200
            await list_models(encrypted)
            num_answered += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(ask())
        for _ in range(2):  # as in any rotation, the clients' roots change first
            roots = (encrypted.folder / "ca.crt").read_bytes()
            new = Authority("public")
            encrypted.folder.joinpath("ca.crt").write_bytes(roots + new.pem)
            before = await asyncio.to_thread(served, encrypted)
            new.write(encrypted.folder, "router", roots=roots + new.pem)
            assert await asyncio.to_thread(served, encrypted) != before
            enough = num_answered + 2
            await eventually(lambda enough=enough: num_answered >= enough, deadline_s=30)
        done.set()


async def test_routers_tell_each_other_of_keys_over_tls(encrypted: Encrypted) -> None:
    redis = connect_blocking(encrypted.cluster.redis_url)
    async with started(encrypted.cluster, encrypted.folder, "r1") as other:
        new = keys.create("acme", "operator", now=time.time())
        service = other.router._keys
        await service._store.put(new.record)
        await service.refresh(other.url)
        await encrypted.router._keys.refresh(encrypted.url)
        await service.refresh(other.url)
        told = await service.revoke(new.record.key_id)
    redis.close()
    assert told.redis == ""
    assert told.routers == {"r0": "", "r1": ""}
