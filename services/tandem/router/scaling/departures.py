"""Decode workers that any router has just requested to leave their pool.

    {tandem:CLUSTER}:departures   HASH, a worker's epoch -> "UNTIL_MS WHO", by the server's clock
A worker that must drain or prefill seems usable until a router reads its new state. So two
simultaneous calls could remove the last two decode workers, each relying on the other one.
Therefore a call first claims its worker and reads the earlier claims of others. While Redis is
lost, a router knows only its own claims.
"""

import time
import uuid
from contextlib import suppress

from tandem.net.store.client import UNREACHABLE, Client
from tandem.net.store.script import Script

CLAIM_S = 3.0  # time until all routers see that a worker leaves

# KEYS: the hash. ARGV: 1 the epoch, 2 the claimer, 3 ms to live. Returns the epochs that others
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
    """The claims of one router."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._key = f"{{tandem:{cluster_id}}}:departures"
        self._who = uuid.uuid4().hex
        self._until: dict[str, float] = {}  # epoch -> monotonic seconds of own claims

    async def claim(self, epoch: str) -> frozenset[str]:
        """Claims a worker. Returns the epochs of other workers that are already claimed."""
        now = time.monotonic()
        self._until = {e: until for e, until in self._until.items() if until > now}
        others = self._until.keys() - {epoch}
        self._until[epoch] = now + CLAIM_S
        with suppress(*UNREACHABLE):
            claimed = await _CLAIM(
                self._redis, [self._key], epoch, self._who, round(CLAIM_S * 1000)
            )
            others |= {each.decode() for each in claimed} - {epoch}
        return frozenset(others)

    def forget(self, epoch: str) -> None:
        """Drops an own claim in this router, which now sees the worker's new state. Others may
        not.
        """
        self._until.pop(epoch, None)

    async def give_up(self, epoch: str) -> None:
        """Ends a claim on all routers, because the worker stays or is back."""
        self.forget(epoch)
        with suppress(*UNREACHABLE):
            await self._redis.hdel(self._key, epoch)
