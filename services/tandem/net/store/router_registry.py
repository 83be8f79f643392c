"""Registers the routers of a cluster in Redis, so that each router can be notified at once of a
revoked key.

    {tandem:CLUSTER}:routers    HASH, router id -> "TIME URL". TIME is the time of the last write in
                                milliseconds of Redis's clock.

A router that shuts down normally deletes its entry. If a router crashes or loses the connection to
Redis, its entry stays for an hour, because a router without Redis may still serve clients. So the
other routers must still notify it of revoked keys.
"""

from tandem.net.store.client import Client
from tandem.net.store.script import Script

KEPT_MS = 3600 * 1000

# Writes the entry of a router and deletes old entries.
#
# KEYS[1]   the hash of routers
# KEYS[2]   another key, whose value is returned
# ARGV[1]   router id
# ARGV[2]   URL of the router
# ARGV[3]   milliseconds for which an entry is kept
# returns   {value of the other key, {router id, URL, router id, URL, ...} of all remaining routers}
_ANNOUNCE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %s', now, ARGV[2]))
local found, entries = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local at, url = string.match(entries[i + 1], '^(%d+) (.+)$')
  if at and now - tonumber(at) <= tonumber(ARGV[3]) then
    found[#found + 1] = entries[i]
    found[#found + 1] = url
  else
    redis.call('HDEL', KEYS[1], entries[i])
  end
end
return {redis.call('GET', KEYS[2]), found}
"""


class RouterRegistry:
    """Writes the entry of one router, and reads the entries of all routers. Errors of redis-py
    propagate."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._redis = redis
        self._key = f"{{tandem:{cluster_id}}}:routers"
        self._announce = Script(_ANNOUNCE)

    async def announce(
        self, router_id: str, url: str, read_key: str
    ) -> tuple[dict[str, str], bytes | None]:
        """Writes this router's entry. Returns the URLs of all routers, by router id, and the value
        of `read_key`, another key of the cluster, so that both take one round trip."""
        value, reply = await self._announce(
            self._redis, [self._key, read_key], router_id, url, KEPT_MS
        )
        words = [word.decode(errors="replace") for word in reply]
        return dict(zip(words[::2], words[1::2], strict=True)), value

    async def remove(self, router_id: str) -> None:
        await self._redis.hdel(self._key, router_id)
