"""The prefix tree in Redis: Lua scripts (lua/*.lua) over shards of 65,536 buckets, each a HASH.

Each shard has up to 31 workers. A worker has a slot in one shard, which is the number of a bit,
from 0 to 30. A shard stores a mask for each block: the bits of the slots whose workers hold the
block. For example, if the workers in slots 0 and 3 hold a block, the mask is 1 + 8 = 9. A slot is
dropped when its worker is forgotten. The slot's bit is then still set in masks until a sweep has
cleared it.

Each shard of a cluster (SHARD is 0, 1, ...) has these keys, which share one hash slot of Redis
Cluster:

    {tandem:CLUSTER:SHARD}:prefix          HASH, the shard's state:
        live        mask of slots in use; clearing a slot's bit here drops the slot
        dirty       mask of dropped slots that the next sweep will clear
        sweeping    mask of dropped slots that the current sweep clears
        cursor      next bucket of the current sweep
        entries     number of blocks in the buckets
        swept       number of masks in which sweeps have cleared bits so far
        next        1 if a worker found this shard full, so that the next shard exists
        log         id of the last entry of the shard's log, or "lost" (lua/append.lua)
        origin      id of the first entry that was ever in the shard's log
        slot:ID     slot of the worker with this id
      and for each slot N in use:
        worker:N    id of the slot's worker
        epoch:N     epoch of the worker's log
        seq:N       next sequence number of the worker's log
        seen:N      time of the worker's last publication, in seconds of Redis's clock
        blocks:N    number of blocks that the worker holds
        logged:N    epoch of a log whose changes are all in the shard's log
        complete:N  epoch of a log in which the worker has published all its blocks
    {tandem:CLUSTER:SHARD}:prefix:b:XX     HASH, the bucket of the hashes that begin with bytes XX:
        bytes 2 to 9 of the block hash -> mask. If a shard has at most 30 million blocks, buckets
        are small enough for Redis's compact encoding (listpack).

    {tandem:CLUSTER:SHARD}:prefix:log      STREAM, the shard's log: the latest changes, which the
        replicas of the routers follow (replica.py)

Fields of dropped slots may remain if a process of an older version has dropped them. So fields that
were added later have the epoch as their value.

The server must not evict keys (`maxmemory-policy noeviction`), because a lost bucket would leave
blocks in the tree without their parents, and `match` relies on the parents. Clients find shards by
following `next` from shard 0. A look-up queries all known shards in one pipeline. If a look-up
discovers another shard, the next look-up also queries that shard. Errors of redis-py propagate.
Redis 6.2 or later is required.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.net.store.client import Client, warm
from tandem.net.store.script import Script

_LUA = Path(__file__).parent / "lua"
SHARDS_MAX = 64
SILENT_S = 60
# Maximum number of simultaneous look-ups of this process. Each look-up needs a connection. Redis
# runs one call at a time, so more connections would not help.
LOOKUPS_AT_ONCE_MAX = 8


class RedisIndex:
    """A client of a cluster's prefix tree in Redis. Any number of clients may use the same tree."""

    def __init__(self, redis: Client, cluster_id: str, *, silent_s: int = SILENT_S) -> None:
        """`sweep` drops a worker that has published nothing for more than `silent_s` seconds."""
        self._redis = redis
        self._cluster_id = cluster_id
        self._silent_s = silent_s
        self._num_shards = 1  # number of shards that this client knows
        self._shard_of: dict[str, int] = {}  # worker id -> shard that has the worker's log
        self._turns = asyncio.Semaphore(LOOKUPS_AT_ONCE_MAX)
        self._match = lua_script("match")
        self._publish = lua_script("append", "publish")
        self._reset = lua_script("append", "drop", "reset")
        self._sweep = lua_script("append", "drop", "sweep")

    async def open(self) -> None:
        """Opens connections, loads the script for look-ups and finds all shards.

        Without this call, the first look-ups are slower, and miss workers in shards that this
        client does not know yet.
        """
        await warm(self._redis, LOOKUPS_AT_ONCE_MAX)
        await self._match.load(self._redis)
        num_shards = 0
        while num_shards != self._num_shards:
            num_shards = self._num_shards
            await self.match([])

    async def reset(self, worker_id: str, epoch: str) -> None:
        if not epoch:
            raise ConfigError(f"the epoch of worker {worker_id} must not be empty")
        self._shard_of.pop(worker_id, None)
        shard, more, placed_in = 0, 1, None
        while more:
            if shard == SHARDS_MAX:
                raise ConfigError(
                    f"the prefix tree has no room for worker {worker_id}: all {SHARDS_MAX} shards "
                    "are full; run fewer workers in this cluster"
                )
            wanted = epoch if placed_in is None else ""
            placed, more = await self._reset(
                self._redis, [self.key(shard)], worker_id, wanted, self._silent_s
            )
            if placed:
                placed_in = self._shard_of[worker_id] = shard
            shard += 1
        self._num_shards = shard

    async def publish(
        self,
        worker_id: str,
        epoch: str,
        sequence_number: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        *,
        complete: bool = False,
    ) -> bool:
        if worker_id not in self._shard_of:
            found = await self.find(worker_id)
            if found is None:
                return False
            self._shard_of[worker_id] = found[0]
        keys = [self.key(self._shard_of[worker_id])]
        args = (worker_id, epoch, sequence_number, b"".join(stored), b"".join(removed))
        applied = bool(await self._publish(self._redis, keys, *args, int(complete)))
        if not applied:
            del self._shard_of[worker_id]
        return applied

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        chain = b"".join(block_hashes)
        async with self._turns:  # waiting is faster than opening another connection
            replies = await self._match.on_each(self._redis, self._keys(), chain, int(closed))
        self._learn(replies[-1][0])
        return {
            reply[i].decode(errors="replace"): reply[i + 1]
            for reply in replies
            for i in range(1, len(reply), 2)
        }

    async def forget(self, worker_id: str) -> None:
        self._shard_of.pop(worker_id, None)
        shard, more = 0, 1
        while more and shard < SHARDS_MAX:
            _, more = await self._reset(
                self._redis, [self.key(shard)], worker_id, "", self._silent_s
            )
            shard += 1

    async def num_blocks(self, worker_id: str) -> int:
        found = await self.find(worker_id)
        if found is None:
            return 0
        shard, slot = found
        (count,) = await self._hmget(shard, f"blocks:{slot}")
        return int(count or 0)

    async def sweep(self, limit: int) -> bool:
        replies = await self._sweep.on_each(self._redis, self._keys(), limit, self._silent_s)
        self._learn(replies[-1][1])
        return any(left for left, _ in replies)

    def key(self, shard: int) -> str:
        return shard_key(self._cluster_id, shard)

    def _keys(self) -> list[str]:
        return [self.key(shard) for shard in range(self._num_shards)]

    def _learn(self, more: int) -> None:
        """Adds the next shard to the known shards if `more` is 1. `more` is the field `next` in the
        reply of the last known shard."""
        if more and self._num_shards < SHARDS_MAX:
            self._num_shards += 1

    async def find(self, worker_id: str) -> tuple[int, int] | None:
        """Returns the (shard, slot) of the worker, or None if the tree does not know the worker."""
        for shard in range(SHARDS_MAX):
            slot, more = await self._hmget(shard, f"slot:{worker_id}", "next")
            if slot is not None:
                return shard, int(slot)
            if more is None:
                break
        return None

    async def _hmget(self, shard: int, *fields: str) -> list[Any]:
        return list(await self._redis.hmget(self.key(shard), list(fields)))


def shard_key(cluster_id: str, shard: int) -> str:
    """Returns the key of a shard's state."""
    return f"{{tandem:{cluster_id}:{shard}}}:prefix"


def lua_script(*names: str) -> Script:
    return Script("".join((_LUA / f"{name}.lua").read_text() for name in names))
