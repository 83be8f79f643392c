"""How every process of Tandem connects to Redis: bounded, impatient, never retrying by itself.

redis-py's own retries would hide an outage for seconds from callers that all have a better answer
to one: the router places without the tree, a worker publishes again, a record is written next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry as SyncRetry

from services.errors import ConfigError

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0
CONNECTIONS_MAX = 64
_SCHEMES = ("redis://", "rediss://", "unix://")


def connect(url: str) -> Redis:
    """A client that connects on first use; errors of redis-py reach the caller at once."""
    return Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        max_connections=CONNECTIONS_MAX,
        retry=Retry(NoBackoff(), 0),
    )


def wait_until_answers(
    url: str, deadline_s: float = 10.0, *, alive: Callable[[], bool] = lambda: True
) -> None:
    """Blocks until the server answers PING. Raises ConfigError, which never shows the password.

    `alive` tells whether the server can still come up: False ends the wait at once.
    """
    give_up_at = time.monotonic() + deadline_s
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"a Redis URL must begin with one of {', '.join(_SCHEMES)}")
    with SyncRedis.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=min(REPLY_TIMEOUT_S, 0.5),
        retry=SyncRetry(NoBackoff(), 0),
    ) as redis:
        where = redis.connection_pool.connection_kwargs
        address = where.get("path") or f"{where.get('host')}:{where.get('port', 6379)}"
        while True:
            try:
                redis.ping()
                return
            except AuthenticationError as error:
                raise ConfigError(f"Redis at {address} refuses the password") from error
            except RedisError as error:
                if time.monotonic() >= give_up_at or not alive():
                    raise ConfigError(
                        f"Redis at {address} does not answer (deadline {deadline_s:g} s): {error}"
                    ) from error
            time.sleep(0.01)
