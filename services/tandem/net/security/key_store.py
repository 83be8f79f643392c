"""The keys in Redis: one hash of a cluster, a field for each key. Errors of redis-py pass through.

{tandem:CLUSTER}:keys          key id -> the record as JSON
{tandem:CLUSTER}:keys:changes  a number that grows with each change, from a random one on: a Redis
                               that lost its data comes to no number that it had before
"""

import logging
import secrets
from collections.abc import Iterable

import msgspec

from tandem.net.security.keys import KeyRecord
from tandem.net.store.client import UNREADABLE, Client
from tandem.net.store.script import Script

log = logging.getLogger(__name__)

# KEYS: 1 the hash of records, 2 the number of changes.
# ARGV: 1 key id, 2 version, 3 record, 4 whether it is a tombstone (1 or 0), 5 the number of changes
# to begin with.
# Writes the record unless that of the key has a higher version, or this one; a tombstone also takes
# the place of a live record of its version. Returns 1 if it was written, else 0.
_PUT = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local read, record = pcall(cjson.decode, old)
  local version = read and tonumber(record.version) or 0
  local is_buried = read and (tonumber(record.revoked_at) or 0) > 0
  if version > tonumber(ARGV[2]) then return 0 end
  if version == tonumber(ARGV[2]) and (ARGV[4] == '0' or is_buried) then return 0 end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[5], 'NX')
redis.call('INCR', KEYS[2])
return 1
"""


class KeyStore:
    """Reads and writes the records of one cluster's keys."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._records = f"{{tandem:{cluster_id}}}:keys"
        self._changes = f"{self._records}:changes"
        self._put = Script(_PUT)

    async def num_changes(self) -> bytes:
        """Returns a value that is another one after each change; empty if there was none."""
        return await self._redis.get(self._changes) or b""  # type: ignore[return-value]

    async def read(self) -> list[KeyRecord]:
        """Returns all records. One that cannot be read is left out and logged."""
        found = await self._redis.hgetall(self._records)
        return [r for r in map(_decode, found.values()) if r is not None]

    async def put(self, record: KeyRecord) -> bool:
        """Writes a record; returns False if Redis has a newer one, or this one."""
        keys = [self._records, self._changes]
        text = msgspec.json.encode(record)
        is_tombstone = int(bool(record.revoked_at))
        args = (record.key_id, record.version, text, is_tombstone, secrets.randbits(48))
        return bool(await self._put(self._redis, keys, *args))

    async def forget(self, key_ids: Iterable[str]) -> None:
        await self._redis.hdel(self._records, *key_ids)


def _decode(value: bytes | str) -> KeyRecord | None:
    try:
        return msgspec.json.decode(value, type=KeyRecord)
    except UNREADABLE as error:
        log.warning("an API key's record in Redis cannot be read: %s", error)
        return None
