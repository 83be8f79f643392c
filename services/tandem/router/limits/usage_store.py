"""Keeps tenants' usage in Redis: one hash for each minute and one for each day. Hashes expire.

key                                    value
{tandem:CLUSTER}:usage:minute:START    hash: "requests TENANT", "prompt_tokens TENANT", ... -> count
{tandem:CLUSTER}:usage:day:START       hash with the same fields
{tandem:CLUSTER}:usage:batch:PROCESS   number of the last accepted batch of a router's process
START is in seconds since 1970, UTC.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from tandem.net.store.client import Client
from tandem.net.store.script import Script

Window = Literal["minute", "day"]
COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class WindowRetention(NamedTuple):
    """The length of a window, and how long Redis keeps it, in seconds."""

    seconds: int
    kept_s: int


WINDOWS: Mapping[Window, WindowRetention] = {
    "minute": WindowRetention(60, 6 * 3600),
    "day": WindowRetention(86400, 400 * 86400),
}
# Seconds that Redis keeps the number of a process's last batch. If a batch were sent again later
# than this, Redis would not recognize the number and would count the batch twice.
_BATCH_KEPT_S = 7 * 86400

# Adds the counts of a batch unless the batch was added before.
# KEYS: 1 the key with the number of the last added batch, then one hash for each window.
# ARGV: 1 the number of this batch, 2 seconds to keep this number, then for each hash one value
# [seconds to keep the hash, [field, count, field, count, ...]].
# Returns 1 if the batch was added, else 0.
_ADD = """
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[1]) then return 0 end
for i = 2, #KEYS do
  local kept, counts = unpack(cmsgpack.unpack(ARGV[i + 1]))
  for j = 1, #counts, 2 do redis.call('HINCRBY', KEYS[i], counts[j], counts[j + 1]) end
  redis.call('EXPIRE', KEYS[i], kept)
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

# KEYS: the hashes of the windows to read. ARGV: the fields to read; without ARGV all fields.
# Returns for each hash {field, count, field, count, ...}.
_READ = """
local found = {}
for i, key in ipairs(KEYS) do
  if #ARGV == 0 then
    found[i] = redis.call('HGETALL', key)
  else
    local row = {}
    for j, count in ipairs(redis.call('HMGET', key, unpack(ARGV))) do
      if count then row[#row + 1], row[#row + 2] = ARGV[j], count end
    end
    found[i] = row
  end
end
return found
"""


class Row(NamedTuple):
    """The window and the tenant of one row of counts. `start` is in seconds since 1970."""

    window: Window
    start: int
    tenant: str


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of one tenant in one window that begins at `start` (seconds since 1970)."""

    tenant: str
    start: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were cached; also counted in prompt_tokens
    completion_tokens: int = 0


class UsageStore:
    """Reads and writes the usage of one cluster's tenants. Errors of redis-py propagate."""

    def __init__(self, redis: Client, cluster_id: str, router_id: str) -> None:
        self._redis = redis
        self._prefix = f"{{tandem:{cluster_id}}}:usage"
        self._batch = f"{self._prefix}:batch:{router_id}/{secrets.token_hex(4)}"
        self._add = Script(_ADD)
        self._read = Script(_READ)

    async def add(self, number: int, rows: Mapping[Row, Sequence[int]]) -> bool:
        """Adds a batch; returns False if a batch with this or a later number was added before."""
        hashes: dict[str, tuple[int, list[str | int]]] = {}
        for row, counts in rows.items():
            key = self._key(row.window, row.start)
            _, fields = hashes.setdefault(key, (WINDOWS[row.window].kept_s, []))
            for column, count in zip(COLUMNS, counts, strict=True):
                fields += (f"{column} {row.tenant}", count)
        packed = [msgspec.msgpack.encode(counts) for counts in hashes.values()]
        keys = [self._batch, *hashes]
        return bool(await self._add(self._redis, keys, number, _BATCH_KEPT_S, *packed))

    async def read(
        self, window: Window, num_windows: int, tenant: str | None, *, now: float
    ) -> list[UsageRow]:
        """Returns the rows of the last `num_windows` windows, oldest first."""
        seconds = WINDOWS[window].seconds
        last = int(now // seconds) * seconds
        starts = [last - n * seconds for n in reversed(range(num_windows))]
        fields = [] if tenant is None else [f"{column} {tenant}" for column in COLUMNS]
        keys = [self._key(window, start) for start in starts]
        found = await self._read(self._redis, keys, *fields)
        return [
            row for start, flat in zip(starts, found, strict=True) for row in _rows(start, flat)
        ]

    def _key(self, window: Window, start: int) -> str:
        return f"{self._prefix}:{window}:{start}"


def _rows(start: int, flat: list[bytes]) -> list[UsageRow]:
    tenants: dict[str, dict[str, int]] = {}
    for name, count in zip(flat[::2], flat[1::2], strict=True):
        column, _, tenant = name.decode().partition(" ")
        if column in COLUMNS:
            tenants.setdefault(tenant, {})[column] = int(count)
    return [UsageRow(tenant, start, **counts) for tenant, counts in sorted(tenants.items())]
