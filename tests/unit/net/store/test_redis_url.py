"""The meaning of each form of URL. The message for a wrong one has no password."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis, RedisCluster, SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection

from tandem.errors import ConfigError
from tandem.net.store.client import connect
from tandem.net.store.url import parse


def test_one_server() -> None:
    address = parse("redis://al%40ice:p%2Fw@db.example:6380/3?health_check_interval=5")
    assert (address.kind, address.tls, address.nodes) == ("server", False, (("db.example", 6380),))
    assert address.options == {
        "username": "al@ice", "password": "p/w", "db": 3, "health_check_interval": 5
    }  # fmt: skip
    assert parse("redis://").nodes == (("localhost", 6379),)
    assert parse("rediss://[::1]:7/").nodes == (("::1", 7),)
    assert parse("unix:///run/redis.sock?db=2").name == "/run/redis.sock"


def test_sentinels() -> None:
    url = "rediss+sentinel://:pw@a,b:5000/main/1?sentinel_password=spw&ssl_check_hostname=no"
    address = parse(url)
    assert (address.kind, address.tls, address.service) == ("sentinel", True, "main")
    assert address.nodes == (("a", 26379), ("b", 5000))
    assert address.options == {"password": "pw", "db": 1, "ssl_check_hostname": False}
    assert address.sentinel_options == {"password": "spw", "ssl_check_hostname": False}
    assert address.name == "a:26379,b:5000 (Sentinel service main)"


def test_a_cluster() -> None:
    address = parse("redis+cluster://u:pw@a:1,b,[fe80::1]:3")
    assert (address.kind, address.nodes) == ("cluster", (("a", 1), ("b", 6379), ("fe80::1", 3)))
    assert address.options == {"username": "u", "password": "pw"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("db.example:6379", "must begin with one of redis://, rediss://, unix://"),
        ("http://:hush@db", "must begin with one of"),
        ("redis://:hush@a,b", "for several use redis.sentinel:// or redis.cluster://"),
        ("redis+sentinel://:hush@a", "must name its service"),
        ("redis+cluster://:hush@a/1", "database 0 only"),
        ("redis://:hush@a:port", "'a:port' in the Redis URL must be HOST or HOST:PORT"),
        ("redis://:hush@a:70000", "must be HOST or HOST:PORT"),
        ("redis://:hush@a?socket_timeout=soon", "socket_timeout"),
        ("rediss://:hush@a?ssl_ca_certs=/none.pem", "/none.pem'.*no such file"),
        ("redis://:hush@a?sentinel_password=hush", "allowed only in redis.sentinel"),
        ("unix://", "must name the path"),
    ],
)
def test_what_is_wrong_is_said(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(url)
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError):
        connect(url)


def test_clients_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    tls = f"?ssl_ca_certs={tmp_path}/ca.pem"
    one = connect(f"rediss://a{tls}")
    watched = connect(f"rediss+sentinel://a/main{tls}")
    assert isinstance(one, Redis)
    assert isinstance(watched, Redis)
    assert issubclass(one.connection_pool.connection_class, SSLConnection)
    assert watched.connection_pool.connection_class is SentinelManagedSSLConnection
    assert watched.connection_pool.connection_kwargs["ssl_ca_certs"] == f"{tmp_path}/ca.pem"
    assert isinstance(connect("redis+cluster://a"), RedisCluster)
    for url in (
        "redis://a?no_such=1",
        "redis+sentinel://a/s?no_such=1",
        "redis+cluster://a?no_such=1",
    ):
        with pytest.raises(ConfigError, match=r"unknown option.*no_such"):
            connect(url)
