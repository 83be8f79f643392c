"""Stores the records of API keys in Redis. Exceptions of redis-py are not caught.

{tandem:CLUSTER}:keys          HASH, key id -> the record as JSON
{tandem:CLUSTER}:keys:changes  counter that grows with each change of a key

The counter starts at a random number. If Redis loses its data, the new counter therefore differs
from every earlier value, and routers notice the loss.
"""

import logging
import secrets
from collections.abc import Iterable

import msgspec

from tandem.net.security.keys import KeyRecord
from tandem.net.store.client import UNREADABLE, Client
from tandem.net.store.script import Script

log = logging.getLogger(__name__)

# Writes a record of a key if its version is higher than that of the stored record. A tombstone also
# replaces a record of the same version that is no tombstone.
#
# KEYS[1]   the hash of records
# KEYS[2]   the change counter
# ARGV[1]   key id
# ARGV[2]   version of the record
# ARGV[3]   the record
# ARGV[4]   1: the record is a tombstone; 0: it is not
# ARGV[5]   the value that a missing change counter gets
# returns   1: the record was written; 0: it was not
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
    """Reads and writes the key records of one cluster."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._records = f"{{tandem:{cluster_id}}}:keys"
        self.changes_key = f"{self._records}:changes"
        self._put = Script(_PUT)

    async def num_changes(self) -> bytes:
        """Reads the change counter. Returns b"" if there was no change yet."""
        return await self._redis.get(self.changes_key) or b""  # type: ignore[return-value]

    async def read(self) -> list[KeyRecord]:
        """Reads all records. Records that cannot be decoded are skipped and logged."""
        found = await self._redis.hgetall(self._records)
        return [r for r in map(_decode, found.values()) if r is not None]

    async def put(self, record: KeyRecord) -> bool:
        """Writes a record. Returns False if Redis has the same or a newer version."""
        keys = [self._records, self.changes_key]
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
        log.warning("the record of an API key in Redis cannot be read and is ignored: %s", error)
        return None
