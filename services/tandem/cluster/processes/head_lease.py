"""The lease by which one host of a cluster runs Ray's head, and the fencing number of that head.

  key                           value
  {tandem:CLUSTER}:head         JSON of `Head`; expires after `LEASE_S` unless the head renews it
  {tandem:CLUSTER}:head-number  the highest fencing number so far
  {tandem:CLUSTER}:owned        JSON of `owned.Owned`, written by the newest controller

Each head has a higher fencing number than all heads before it. Every write of a head or its
controller carries the number, and Redis refuses a number that is not the highest. Example: head 1
is paused, its lease expires, and another host becomes head 2. When head 1 continues, Redis refuses
its writes, because 1 is less than 2. If Redis loses its data, the current head writes its number
again.
"""

import logging
from collections.abc import Mapping

import msgspec

from tandem.net.store.client import UNREACHABLE, SyncClient, connect_blocking
from tandem.net.store.control_state import HEAD_KEY, Head, control_key

log = logging.getLogger(__name__)

LEASE_S = 8.0
RENEW_INTERVAL_S = 2.0

# Takes the lease. KEYS: head, head-number. ARGV: host, time to live in ms. Returns 0 if another
# host has the lease, otherwise the new fencing number.
_TAKE = """
local held = redis.call('get', KEYS[1])
if held and cjson.decode(held).host ~= ARGV[1] then return 0 end
local number = redis.call('incr', KEYS[2])
local head = cjson.encode({number = number, host = ARGV[1], address = ''})
redis.call('set', KEYS[1], head, 'PX', ARGV[2])
return number
"""

# Renews the lease. KEYS: head, head-number. ARGV: fencing number, JSON of the head, time to live in
# ms. Returns 0 if there is a head with a higher number, otherwise 1.
_RENEW = """
local highest = tonumber(redis.call('get', KEYS[2]) or '0')
if highest > tonumber(ARGV[1]) then return 0 end
redis.call('set', KEYS[2], ARGV[1])
redis.call('set', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""

# Sets keys. KEYS: head-number, then the keys to set. ARGV: fencing number, then a value for each
# key to set. Returns 0 and sets nothing if there is a head with a higher number, otherwise 1.
_SET = """
local highest = tonumber(redis.call('get', KEYS[1]) or '0')
if highest > tonumber(ARGV[1]) then return 0 end
redis.call('set', KEYS[1], ARGV[1])
for i = 2, #KEYS do redis.call('set', KEYS[i], ARGV[i]) end
return 1
"""


class HeadLease:
    """Takes, renews and reads the lease for one host. Calls raise the exceptions in
    `store.client.UNREACHABLE`."""

    def __init__(self, redis_url: str, cluster_id: str, host_id: str) -> None:
        self._cluster_id = cluster_id
        self._host_id = host_id
        self._redis_url = redis_url
        self._client: SyncClient | None = None

    def read(self) -> Head | None:
        """Reads the current head; None if no host holds the lease."""
        found = self._redis.get(_key(self._cluster_id, "head"))
        return msgspec.json.decode(found, type=Head) if isinstance(found, bytes | str) else None

    def take(self) -> int | None:
        """Takes the lease and returns this host's new fencing number; None if another host holds
        it."""
        number = self._eval(_TAKE, ["head", "head-number"], self._host_id, _ms(LEASE_S))
        return number or None

    def renew(self, number: int, address: str) -> bool:
        """Renews the lease. Returns False if there is a head with a higher number."""
        head = msgspec.json.encode(Head(number, self._host_id, address))
        return bool(self._eval(_RENEW, ["head", "head-number"], number, head, _ms(LEASE_S)))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def _redis(self) -> SyncClient:
        if self._client is None:
            self._client = connect_blocking(self._redis_url)
        return self._client

    def _eval(self, script: str, names: list[str], *values: bytes | str | int) -> int:
        keys = [_key(self._cluster_id, name) for name in names]
        return int(self._redis.eval(script, len(keys), *keys, *values))


def fenced_set(
    redis: SyncClient, cluster_id: str, number: int, values: Mapping[str, bytes | str]
) -> bool:
    """Sets these keys of the cluster. Returns False and sets nothing if there is a head with a
    higher number. Raises the exceptions in `store.client.UNREACHABLE`."""
    keys = [_key(cluster_id, name) for name in ("head-number", *values)]
    return bool(redis.eval(_SET, len(keys), *keys, number, *values.values()))


def publish_head(redis_url: str, cluster_id: str, head: Head) -> None:
    """Publishes the head of a cluster of one machine, so that routers can show it. This head has no
    lease. Does nothing if Redis does not answer."""
    try:
        redis = connect_blocking(redis_url)
        redis.set(control_key(cluster_id, HEAD_KEY), msgspec.json.encode(head))
        redis.close()
    except UNREACHABLE as error:
        log.warning(
            "Redis does not answer (%s), so routers may show an old state, or no state, of Ray's "
            "head",
            error,
        )


def _key(cluster_id: str, name: str) -> str:
    return control_key(cluster_id, name)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
