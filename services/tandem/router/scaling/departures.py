"""Decode workers that were told to leave their pool a moment ago, at any router.

    {tandem:CLUSTER}:departures   HASH, a worker's epoch -> "UNTIL_MS WHO", by the server's clock

A worker that was told to drain or to prefill seems usable until a router hears of it. So two calls
at once could take the last two decode workers, each because of the other one. A call therefore
claims its worker first, and sees the claims that others made before. While Redis is lost, a router
knows its own claims only.
"""

import time
import uuid
from contextlib import suppress

from tandem.net.store.client import UNREACHABLE, Client
from tandem.net.store.script import Script

CLAIM_S = 3.0  # until all routers know of a worker that leaves

# KEYS: the hash. ARGV: 1 the epoch, 2 who claims it, 3 ms to live. Returns the epochs that others
# claim.
_CLAIM = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, others = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #known, 2 do
  local ends, who = string.match(known[i + 1], '^(%d+) (.*)$')
  if tonumber(ends or 0) < now then
    redis.call('HDEL', KEYS[1], known[i])
  elseif who ~= ARGV[2] then
    table.insert(others, known[i])
  end
end
local ends = string.format('%.0f %s', now + ARGV[3], ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], ends)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return others
""")


class Departures:
    """The claims as one router makes and reads them."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._key = f"{{tandem:{cluster_id}}}:departures"
        self._who = uuid.uuid4().hex
        self._until: dict[str, float] = {}  # epoch -> monotonic seconds, of own claims

    async def claim(self, epoch: str) -> frozenset[str]:
        """Claims a worker. Returns the epochs of the other workers that are claimed already."""
        now = time.monotonic()
        self._until = {e: until for e, until in self._until.items() if until > now}
        others = self._until.keys() - {epoch}
        self._until[epoch] = now + CLAIM_S
        with suppress(*UNREACHABLE):
            told = await _CLAIM(self._redis, [self._key], epoch, self._who, round(CLAIM_S * 1000))
            others |= {each.decode() for each in told} - {epoch}
        return frozenset(others)

    def forget(self, epoch: str) -> None:
        """Ends an own claim here: this router knows by now where the worker is. Others may not."""
        self._until.pop(epoch, None)

    async def give_up(self, epoch: str) -> None:
        """Ends a claim at all routers: the worker stays, or is back."""
        self.forget(epoch)
        with suppress(*UNREACHABLE):
            await self._redis.hdel(self._key, epoch)
