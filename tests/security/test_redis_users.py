"""A stolen Redis user of one kind of process can access no key of another kind, on a real
server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.tls import Kind
from tandem.net.store.client import connect, connect_blocking
from tandem.net.store.registry import Registry

pytestmark = pytest.mark.service

TAG = "{tandem:c1}"
SECRETS = f"{TAG}:keys"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A server with the users of cluster c1, and a key of each kind of process."""
    with EmbeddedRedis(cluster_id="c1") as server, closing(connect_blocking(server.url)) as redis:
        redis.hset(SECRETS, "id", "record")
        redis.set(f"{TAG}:pools", "{}")
        redis.set(f"{TAG}:worker:w0", "record")
        redis.set("{tandem:c2}:worker:w0", "record")
        yield server


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("worker", f"HGETALL {SECRETS}"),
        ("worker", f"HSET {SECRETS} id mine"),
        ("worker", f"DEL {SECRETS}"),
        ("worker", f"SET {SECRETS}:changes 1"),
        ("worker", f"HGETALL {TAG}:routers"),
        ("worker", f"HSET {TAG}:routers r9 http://evil.example"),
        ("worker", f"SET {TAG}:pools x"),
        ("worker", f"LPUSH {TAG}:scale x"),
        ("worker", f"RENAME {SECRETS} {TAG}:worker:w1"),
        ("worker", f"COPY {SECRETS} {TAG}:worker:w1"),
        ("worker", "GET {tandem:c2}:worker:w0"),
        ("worker", "SCAN 0"),
        ("controller", f"HGETALL {SECRETS}"),
        ("controller", f"GET {TAG}:worker:w0"),
        ("controller", f"SET {TAG}:worker:w0 x"),
        ("controller", f"MGET {TAG}:worker:w0:pairs {TAG}:worker:w0"),
        ("router", "GET {tandem:c2}:worker:w0"),
        *(
            (kind, command)
            for kind in ("router", "worker", "controller")
            for command in (
                "ACL LIST",
                "CONFIG GET *",
                "FLUSHALL",
                "KEYS *",
                "SHUTDOWN",
                "MONITOR",
                "REPLICAOF localhost 1",
                "CLIENT KILL TYPE normal",
                "FUNCTION DELETE x",
                "MODULE LIST",
            )
        ),
    ],
)
def test_a_foreign_key_or_command_is_refused(
    server: EmbeddedRedis, kind: Kind, command: str
) -> None:
    with closing(connect_blocking(server.url_of(kind))) as redis, pytest.raises(NoPermissionError):
        redis.execute_command(*command.split())


def test_a_script_reaches_no_further(server: EmbeddedRedis) -> None:
    """A worker may run scripts, whose calls have the restrictions of the user."""
    script = f"return redis.call('HGETALL', '{SECRETS}')"
    with closing(connect_blocking(server.url_of("worker"))) as redis:
        with pytest.raises(ResponseError, match=r"(?i)permission|ACL"):
            redis.eval(script, 0)
        assert redis.get(f"{TAG}:worker:w0") == b"record"


@pytest.mark.asyncio
async def test_a_worker_takes_itself_off_the_registry(server: EmbeddedRedis) -> None:
    redis = connect(server.url_of("worker"))
    try:
        await redis.sadd(f"{TAG}:workers", "w0", "leaves")
        await Registry(redis, ClusterConfig("c1", server.url, "token")).remove("leaves")
        assert await redis.smembers(f"{TAG}:workers") == {b"w0"}
    finally:
        await redis.aclose()


def test_a_guess_gets_nothing(server: EmbeddedRedis) -> None:
    url = server.url_of("router").replace("router:", "router:x")
    with closing(connect_blocking(url)) as redis, pytest.raises(AuthenticationError):
        redis.ping()
