"""Redis clients for every process of Tandem, with a limited number of connections, short timeouts
and no retries.

If Redis is down, redis-py's retries would delay the error by seconds. Every caller has something
better to do than to wait. For example, the router places requests without the prefix tree, and a
worker writes its record again at the next interval.

The clients for one server, for Sentinel and for Redis Cluster (store/url.py) have the same methods.
All keys of one call or script share a hash tag, so that the call also works on a Redis Cluster.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar, TypeAlias

import msgspec
from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis import Sentinel as SyncSentinel
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError
from redis.retry import Retry as SyncRetry

from tandem.errors import ConfigError
from tandem.net.store.url import parse

Client: TypeAlias = Redis | RedisCluster
SyncClient: TypeAlias = SyncRedis | SyncRedisCluster

# Errors that a call to Redis raises if the server is unreachable, is slow or refuses the call.
# RedisClusterException is not a subclass of RedisError.
UNREACHABLE = (RedisError, RedisClusterException, OSError, TimeoutError)
# Errors that msgspec raises for a value that another version of Tandem or another program wrote.
# UnicodeDecodeError means invalid UTF-8.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
CONNECTIONS_MAX = 64  # maximum number of connections that a client opens to each server


def connect(url: str) -> Client:
    """Returns a client for asyncio. The client connects on first use and does not retry a failed
    call, so the error of redis-py reaches the caller at once.

    Raises ConfigError for an invalid URL.
    """
    kinds = (Redis, Sentinel, RedisCluster, ClusterNode)
    retry = Retry(NoBackoff(), 0)
    client: Client = _client(
        url, kinds, retry=retry, socket_timeout=REPLY_TIMEOUT_S, max_connections=CONNECTIONS_MAX
    )
    return client


def connect_blocking(url: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> SyncClient:
    """Returns a client for threads. For a Redis Cluster, this function reads the list of nodes, so
    it may raise RedisError.
    """
    kinds = (SyncRedis, SyncSentinel, SyncRedisCluster, SyncClusterNode)
    retry = SyncRetry(NoBackoff(), 0)
    client: SyncClient = _client(url, kinds, retry=retry, socket_timeout=reply_timeout_s)
    return client


async def warm(redis: Client, num_connections: int) -> None:
    """Opens `num_connections` connections to each primary server in advance, so that a later burst
    of calls does not wait for connections. Errors of redis-py propagate."""
    if isinstance(redis, RedisCluster):
        await redis.initialize()
        calls = [redis.ping(target_nodes=RedisCluster.PRIMARIES) for _ in range(num_connections)]
    else:
        calls = [redis.ping() for _ in range(num_connections)]
    # The calls run concurrently, so that each call opens a connection of its own.
    await asyncio.gather(*calls)


def wait_until_answers(
    url: str, deadline_s: float = 10.0, *, alive: Callable[[], bool] = lambda: True
) -> None:
    """Blocks until the server answers PING. If it does not answer within `deadline_s`, raises
    ConfigError. The error message never shows the password.

    `alive` returns True while the server may still start. When `alive` returns False, the function
    raises the error at once.
    """
    give_up_at = time.monotonic() + deadline_s
    name = parse(url).name
    while True:
        try:
            with closing(connect_blocking(url, reply_timeout_s=0.5)) as redis:
                redis.ping()
                return
        except UNREACHABLE as error:
            if AuthenticationError in (type(error), type(error.__cause__)):
                raise ConfigError(
                    f"Redis at {name} refuses the password of the Redis URL"
                ) from error
            if time.monotonic() >= give_up_at or not alive():
                raise ConfigError(
                    f"Redis at {name} does not answer (deadline {deadline_s:g} s): {error}"
                ) from error
        time.sleep(0.01)


class _RenewedConnection(SSLConnection):
    """A TLS connection. All connections share one TLS context until the certificate files change.

    redis-py itself makes a TLS context for each connection object of the pool, and keeps the
    context as long as the process runs. So it does not notice renewed certificate files. Making a
    context also takes 20 ms, because all root certificates of the system are read.
    """

    # (text, TLS context). The text describes the TLS options and the versions of the certificate
    # files from which the context was made. If the text changes, a new context is needed.
    _shared: ClassVar[tuple[str, Any]] = ("", None)

    def _connection_arguments(self) -> Any:
        own = self.ssl_context
        own.context = None
        options = [getattr(own, name) for name in own.__slots__]
        paths = (own.ca_certs, own.certfile, own.keyfile)
        made_of = repr((options, [_identity(path) for path in paths]))
        known, context = _RenewedConnection._shared
        own.context = context if made_of == known else own.get()
        _RenewedConnection._shared = (made_of, own.context)
        return super()._connection_arguments()


def _identity(path: str | None) -> tuple[int, ...]:
    try:
        found = os.stat(path or "")
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _client(url: str, kinds: tuple[Any, Any, Any, Any], **bounds: Any) -> Any:
    """Returns a client for the kind of server in the URL. `kinds` are redis-py's classes for one
    server, Sentinel, Cluster and cluster node, all for asyncio or all for threads."""
    address = parse(url)
    server, sentinel, cluster, node = kinds
    bounds["socket_connect_timeout"] = CONNECT_TIMEOUT_S
    options = {**bounds, **address.options}
    try:
        match address.kind:
            case "server":
                client = server.from_url(url, **options)
                if address.tls and server is Redis:
                    client.connection_pool.connection_class = _RenewedConnection
            case "sentinel":
                bounded = ("socket_connect_timeout", "socket_timeout", "retry")
                own = {name: options[name] for name in bounded} | address.sentinel_options
                own["ssl"] = options["ssl"] = address.tls
                watched = sentinel(address.nodes, sentinel_kwargs=own, **options)
                client = watched.master_for(address.service)
            case "cluster":
                options["startup_nodes"] = [node(host, port) for host, port in address.nodes]
                # Without full coverage, the client can use the other shards if all nodes of a shard
                # are down.
                return cluster(ssl=address.tls, require_full_coverage=False, **options)
        # `make_connection` does not connect, but raises TypeError for an unknown option of the URL.
        client.connection_pool.make_connection()
        return client
    except TypeError as error:  # redis-py's error for an unknown option
        raise ConfigError(f"the Redis URL has an unknown option: {error}") from None
