"""Kept responses in Redis, which all routers of a cluster share.

key                                   value
{tandem:CLUSTER}:responses:kept       hash: response id -> the response, in msgpack
{tandem:CLUSTER}:responses:order      sorted set, by its entries' bytes. An entry is the tenant, a
                                      zero byte, the response's number, a zero byte, its id
{tandem:CLUSTER}:responses:entries    hash: response id -> its entry in the sorted set
{tandem:CLUSTER}:responses:num        sorted set: tenant -> number of the tenant's responses
{tandem:CLUSTER}:responses:bytes      sorted set: tenant -> their bytes
{tandem:CLUSTER}:responses:total      string: bytes of all responses
{tandem:CLUSTER}:responses:last       string: number of the latest response

The bounds and the order of eviction are those of kept.py. All keys expire after _KEPT_S without a
new response, so that an ended cluster leaves nothing.
"""

from typing import Any

import msgspec

from tandem.api.responses.kept import KeptResponse, bytes_max_of
from tandem.net.store.client import Client
from tandem.net.store.script import Script

_NAMES = ("kept", "order", "entries", "num", "bytes", "total", "last")
_KEPT_S = 30 * 86_400

# Lua function: forgets one response. KEYS: as in _NAMES.
_FORGET = """
local function forget(id)
  local entry = redis.call('HGET', KEYS[3], id)
  if not entry then return 0 end
  local tenant = string.match(entry, '^(%Z*)')
  local size = redis.call('HSTRLEN', KEYS[1], id)
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], entry)
  redis.call('HDEL', KEYS[3], id)
  redis.call('ZINCRBY', KEYS[5], -size, tenant)
  if tonumber(redis.call('ZINCRBY', KEYS[4], -1, tenant)) <= 0 then
    redis.call('ZREM', KEYS[4], tenant)
    redis.call('ZREM', KEYS[5], tenant)
  end
  redis.call('DECRBY', KEYS[6], size)
  return 1
end
"""
# Keeps a response, and forgets others until no limit is exceeded.
# KEYS: as in _NAMES. ARGV: 1 id, 2 tenant, 3 the response, 4 largest number, 5 largest bytes,
# 6 seconds until the keys expire.
_KEEP = (
    _FORGET
    + """
local function forget_oldest(by)
  local tenant = redis.call('ZREVRANGE', by, 0, 0)[1]
  local first = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. tenant .. '\\0', '+', 'LIMIT', 0, 1)[1]
  forget(string.match(first, '(%Z*)$'))
end
local id, tenant, response = ARGV[1], ARGV[2], ARGV[3]
local number = string.format('%015d', redis.call('INCR', KEYS[7]))
local entry = tenant .. '\\0' .. number .. '\\0' .. id
redis.call('HSET', KEYS[1], id, response)
redis.call('ZADD', KEYS[2], 0, entry)
redis.call('HSET', KEYS[3], id, entry)
redis.call('ZINCRBY', KEYS[4], 1, tenant)
redis.call('ZINCRBY', KEYS[5], #response, tenant)
redis.call('INCRBY', KEYS[6], #response)
while redis.call('HLEN', KEYS[1]) > tonumber(ARGV[4]) do forget_oldest(KEYS[4]) end
while tonumber(redis.call('GET', KEYS[6])) > tonumber(ARGV[5]) do forget_oldest(KEYS[5]) end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[6]) end
"""
)
# KEYS: as in _NAMES. ARGV: 1 id. Returns 1 if the response was kept, else 0.
_DELETE = _FORGET + "return forget(ARGV[1])"


class SharedResponses:
    """The latest `num_max` responses of a cluster. Errors of redis-py propagate."""

    def __init__(self, redis: Client, cluster_id: str, num_max: int) -> None:
        self._redis = redis
        self._num_max = num_max
        self._keys = [f"{{tandem:{cluster_id}}}:responses:{name}" for name in _NAMES]
        self._keep = Script(_KEEP)
        self._delete = Script(_DELETE)

    async def keep(self, response_id: str, response: KeptResponse) -> None:
        """Keeps a response. Evicts old responses until no limit is exceeded."""
        about: list[bytes | str | int] = [response_id, response.tenant]
        limits = (self._num_max, bytes_max_of(self._num_max), _KEPT_S)
        encoded = msgspec.msgpack.encode(response)
        await self._keep(self._redis, self._keys, *about, encoded, *limits)

    async def find(self, response_id: str) -> KeptResponse | None:
        """Returns a kept response of any tenant; None if it is not kept."""
        found: Any = await self._redis.hget(self._keys[0], response_id)
        return None if found is None else msgspec.msgpack.decode(found, type=KeptResponse)

    async def delete(self, response_id: str) -> None:
        """Deletes a response, if it is kept."""
        await self._delete(self._redis, self._keys, response_id)
