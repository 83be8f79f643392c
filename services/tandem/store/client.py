"""Connects every process of Tandem to Redis: bounded, impatient, never retrying by itself.

redis-py's own retries would hide an outage for seconds from callers that all have a better answer
to one: the router places without the tree, a worker publishes again, a record is written next time.
One server, Sentinel and Cluster (store/url.py) give clients that take the same calls; keys that one
call or script touches share a hash tag, so that they also work on a Cluster.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis import Sentinel as SyncSentinel
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.exceptions import AuthenticationError, RedisClusterException, RedisError
from redis.retry import Retry as SyncRetry

from tandem.errors import ConfigError
from tandem.store.url import RedisAddress, parse

Client: TypeAlias = Redis | RedisCluster
SyncClient: TypeAlias = SyncRedis | SyncRedisCluster

# What a call raises when Redis is lost, slow or refuses it; a Cluster's error is no RedisError.
UNREACHABLE = (RedisError, RedisClusterException, OSError, TimeoutError)

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
CONNECTIONS_MAX = 64  # to one server


def connect(url: str) -> Client:
    """Returns a client that connects on first use; errors of redis-py reach the caller at once.

    Raises ConfigError for a URL that cannot be right.
    """
    address = parse(url)
    options = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "max_connections": CONNECTIONS_MAX,
        "retry": Retry(NoBackoff(), 0),
        **address.options,
    }
    try:
        return _connect(url, address, options)
    except TypeError as error:  # what redis-py says to an option it does not have
        raise ConfigError(f"the Redis URL has a wrong option: {error}") from None


def connect_blocking(url: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> SyncClient:
    """Returns the same for threads. For a Cluster it asks for the nodes at once: RedisError."""
    address = parse(url)
    options = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": reply_timeout_s,
        "retry": SyncRetry(NoBackoff(), 0),
        **address.options,
    }
    try:
        return _connect_blocking(url, address, options)
    except TypeError as error:
        raise ConfigError(f"the Redis URL has a wrong option: {error}") from None


async def warm(redis: Client, num_connections: int) -> None:
    """Opens connections, to each primary, so that a burst finds them. Errors pass through."""
    if isinstance(redis, RedisCluster):
        await redis.initialize()
        calls = [redis.ping(target_nodes=RedisCluster.PRIMARIES) for _ in range(num_connections)]
    else:
        calls = [redis.ping() for _ in range(num_connections)]
    # All at once: each takes a connection of its own.
    await asyncio.gather(*calls)


def wait_until_answers(
    url: str, deadline_s: float = 10.0, *, alive: Callable[[], bool] = lambda: True
) -> None:
    """Blocks until the server answers PING. Raises ConfigError, which never shows the password.

    `alive` tells whether the server can still come up: False ends the wait at once.
    """
    give_up_at = time.monotonic() + deadline_s
    name = parse(url).name
    while True:
        try:
            redis = connect_blocking(url, reply_timeout_s=min(REPLY_TIMEOUT_S, 0.5))
            try:
                redis.ping()
                return
            finally:
                redis.close()
        except UNREACHABLE as error:
            if AuthenticationError in (type(error), type(error.__cause__)):
                raise ConfigError(f"Redis at {name} refuses the password") from error
            if time.monotonic() >= give_up_at or not alive():
                raise ConfigError(
                    f"Redis at {name} does not answer (deadline {deadline_s:g} s): {error}"
                ) from error
        time.sleep(0.01)


def _connect(url: str, address: RedisAddress, options: dict[str, Any]) -> Client:
    match address.kind:
        case "server":
            redis = Redis.from_url(url, **options)
        case "sentinel":
            redis = _sentinel(Sentinel, address, options).master_for(address.service)
        case "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.nodes]
            return RedisCluster(startup_nodes=nodes, **_of_cluster(address), **options)
    # Refuses a wrong option; connects to nothing yet.
    redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    return redis


def _connect_blocking(url: str, address: RedisAddress, options: dict[str, Any]) -> SyncClient:
    match address.kind:
        case "server":
            return SyncRedis.from_url(url, **options)
        case "sentinel":
            client: SyncClient = _sentinel(SyncSentinel, address, options).master_for(
                address.service
            )
            return client
        case "cluster":
            known: list[Any] = [SyncClusterNode(*node) for node in address.nodes]  # type: ignore[no-untyped-call]
            return SyncRedisCluster(startup_nodes=known, **_of_cluster(address), **options)


def _sentinel(kind: type[Any], address: RedisAddress, options: dict[str, Any]) -> Any:
    bounds = ("socket_connect_timeout", "socket_timeout", "retry")
    own = {name: options[name] for name in bounds} | address.sentinel_options
    return kind(
        address.nodes, sentinel_kwargs={**own, "ssl": address.tls}, ssl=address.tls, **options
    )


def _of_cluster(address: RedisAddress) -> dict[str, Any]:
    # A shard whose nodes are all down must not keep the others from serving.
    return {"ssl": address.tls, "require_full_coverage": False}
