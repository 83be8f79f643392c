"""Claims decode workers that are about to leave their pool. All routers share the claims.

    {tandem:CLUSTER}:departures   HASH, a worker's epoch -> "UNTIL_MS WHO"
UNTIL_MS is the time when the claim ends, by the clock of the Redis server. WHO is the router's
random name.

Claims prevent two simultaneous calls from removing the last two decode workers. Example: A and B
are the only decode workers. Without claims, one call drains A, because B remains. Another call
drains B, because the other router does not know yet that A drains. With claims, the first call
claims A. The second call claims B, finds that A is claimed, and is refused.

While Redis does not answer, a router knows only its own claims.
"""

import time
import uuid
from contextlib import suppress

from tandem.net.store.client import UNREACHABLE, Client
from tandem.net.store.script import Script

# Seconds that a claim lasts. Within this time, all routers learn that the claimed worker leaves.
CLAIM_S = 3.0

# KEYS: 1 the hash of claims. ARGV: 1 the worker's epoch, 2 the claiming router, 3 ms to live.
# Returns the epochs of the workers that other routers have claimed.
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
    """Claims decode workers for one router."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._key = f"{{tandem:{cluster_id}}}:departures"
        self._who = uuid.uuid4().hex
        # Claims of this router: epoch of the worker -> end of the claim, in monotonic seconds.
        self._until: dict[str, float] = {}

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
        """Forgets a claim in this router, whose view shows by now that the worker has left.

        The claim stays in Redis, because other routers may not see that yet.
        """
        self._until.pop(epoch, None)

    async def give_up(self, epoch: str) -> None:
        """Ends a claim for all routers. The caller knows that the worker is still in its pool."""
        self.forget(epoch)
        with suppress(*UNREACHABLE):
            await self._redis.hdel(self._key, epoch)
