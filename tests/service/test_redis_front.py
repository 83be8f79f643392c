"""The TLS port before a Redis server: who gets through, and what passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from tandem.cluster.launch.certificates import Authority
from tandem.common.config.redis_front import RedisFrontOptions
from tandem.common.config.tls import Kind
from tandem.errors import ConfigError
from tandem.net.security.redis_front import RedisFront
from tandem.net.store.client import UNREACHABLE, Client, connect
from tests.harness.redis_kinds import HOST, Server
from tests.harness.waiting import eventually

pytestmark = pytest.mark.service

CLUSTER = "c1"


@dataclass
class Fronted:
    """A running server and its front."""

    folder: Path
    authority: Authority
    server: Server
    front: RedisFront

    def client(self, kind: Kind = "router", authority: Authority | None = None) -> Client:
        """Returns a client with a new certificate of this kind."""
        (authority or self.authority).write(self.folder / kind, kind, roots=self.authority.pem)
        return connect(self.url(kind))

    def url(self, kind: str) -> str:
        files = (("ca_certs", "ca.crt"), ("certfile", "tls.crt"), ("keyfile", "tls.key"))
        query = "&".join(f"ssl_{name}={self.folder / kind / file}" for name, file in files)
        # Certificates name kinds of processes; the chart's also names the Service.
        return f"rediss://{HOST}:{self.front.port}?{query}&ssl_check_hostname=no"


@pytest.fixture
async def fronted(tmp_path: Path) -> AsyncIterator[Fronted]:
    authority = Authority(CLUSTER)
    authority.write(tmp_path / "redis", "worker")
    path = tmp_path / "redis.sock"
    server = Server.start(tmp_path, f"unixsocket {path}")
    await eventually(path.exists)
    options = RedisFrontOptions(
        cluster_id=CLUSTER, socket=str(path), tls_dir=str(tmp_path / "redis"), host=HOST, port=0
    )
    front = RedisFront(options)
    serving = asyncio.create_task(front.run())
    yield Fronted(tmp_path, authority, server, front)
    serving.cancel()
    server.stop()


async def test_large_values_pass_both_ways(fronted: Fronted) -> None:
    value = bytes(range(256)) * (1 << 16)  # 16 MiB: more than any buffer on the way
    async with fronted.client("router") as one, fronted.client("worker") as two:
        await one.set("large", value)
        found = await asyncio.gather(*(two.get("large") for _ in range(4)))
        assert all(each == value for each in found)


@pytest.mark.parametrize("stranger", ["foreign", "other-cluster", "no-certificate", "clear"])
async def test_a_stranger_does_not_reach_the_server(fronted: Fronted, stranger: str) -> None:
    match stranger:
        case "foreign":  # of another authority, with the right name
            client = fronted.client(authority=Authority(CLUSTER))
        case "other-cluster":  # of an authority that others use, too
            roots = fronted.authority
            (fronted.folder / "router").mkdir()
            other = Authority("c2")
            both = roots.pem + other.pem
            roots.write(fronted.folder / "redis", "worker", roots=both)
            client = fronted.client(authority=other)
        case "no-certificate":
            roots_file = fronted.folder / "redis" / "ca.crt"
            query = f"ssl_ca_certs={roots_file}&ssl_check_hostname=no"
            client = connect(f"rediss://{HOST}:{fronted.front.port}?{query}")
        case _:
            client = connect(f"redis://{HOST}:{fronted.front.port}")
    async with client:
        with pytest.raises((RedisError, *UNREACHABLE)):
            await client.ping()
    with fronted.server.client(None) as direct:
        assert direct.info("stats")["total_connections_received"] <= 2
    async with fronted.client() as ours:
        assert await ours.ping()


async def test_a_tcp_probe_leaves_no_line_in_the_log(
    fronted: Fronted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.net.security.redis_front")
    for _ in range(3):
        _, probe = await asyncio.open_connection(HOST, fronted.front.port)
        probe.close()
        await probe.wait_closed()
    async with fronted.client() as client:
        assert await client.ping()
    assert not caplog.records
    clear = connect(f"redis://{HOST}:{fronted.front.port}")
    async with clear:
        with pytest.raises((RedisError, *UNREACHABLE)):
            await clear.ping()
    await eventually(lambda: "before it reached Redis" in caplog.text)


async def test_new_certificates_are_taken_for_new_connections(fronted: Fronted) -> None:
    """Both ends and their root are replaced, in the three steps of docs/tls.md."""
    async with fronted.client() as client:
        assert await client.ping()
        old = fronted.authority
        new = Authority(CLUSTER)
        folders: tuple[tuple[str, Kind], ...] = (("redis", "worker"), ("router", "router"))
        for authority, roots in (
            (old, old.pem + new.pem),
            (new, old.pem + new.pem),
            (new, new.pem),
        ):
            for name, kind in folders:
                authority.write(fronted.folder / name, kind, roots=roots)
            assert await client.ping()  # the open connection goes on
            await client.connection_pool.disconnect()
            assert await client.ping()
    fronted.authority = new
    async with fronted.client(authority=old) as left_behind:
        with pytest.raises((RedisError, *UNREACHABLE)):
            await left_behind.ping()


async def test_a_lost_server_ends_its_connections(fronted: Fronted) -> None:
    async with fronted.client() as client:
        assert await client.ping()
        fronted.server.stop()
        for _ in range(2):  # of the connection that was open, and of a new one
            with pytest.raises((RedisError, *UNREACHABLE)):
                await client.ping()
    await eventually(lambda: fronted.front.num_open == 0)


def test_a_taken_port_and_missing_certificates_are_told(tmp_path: Path) -> None:
    def front(port: int) -> RedisFront:
        return RedisFront(
            RedisFrontOptions(
                cluster_id=CLUSTER, socket="/s", tls_dir=str(tmp_path), host=HOST, port=port
            )
        )

    with pytest.raises(ConfigError, match=r"tls\.crt"):
        front(0)
    Authority(CLUSTER).write(tmp_path, "worker")
    first = front(0)
    with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{first.port}"):
        front(first.port)
