"""A prefix tree whose look-ups are answered by a replica that has caught up with Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tandem.common.process.cancellation import cancel
from tandem.net.store.client import UNREACHABLE, Client
from tandem.prefix_index.entries import NUM_BUCKETS
from tandem.prefix_index.replica import Replica
from tandem.prefix_index.replicated import ReplicatedIndex
from tandem.prefix_index.shard_replica import Scan, ShardReplica


class FollowedIndex(ReplicatedIndex):
    """Waits before each look-up until the replica has applied all changes in Redis, and does not
    ask Redis for a look-up."""

    async def match(self, block_hashes: Sequence[bytes], *, closed: bool = True) -> dict[str, int]:
        await self.catch_up()
        found = self.replica.match(block_hashes, closed=closed)
        assert found is not None, "the replica cannot be used"
        return found

    async def num_blocks(self, worker_id: str) -> int:
        await self.catch_up()
        return sum(shard.num_blocks(worker_id) for shard in self.replica.shards)

    async def catch_up(self) -> None:
        async with asyncio.timeout(20.0):
            while not await self._is_caught_up():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def _is_caught_up(self) -> bool:
        shards = self.replica.shards
        try:
            scans = [await self.replica.scan(n, NUM_BUCKETS, 0) for n in range(len(shards))]
        except UNREACHABLE:  # a connection to a server that was restarted
            return False
        return (
            bool(scans)
            and not scans[-1].has_next
            and self.replica.is_usable
            and all(
                shard.position == scan.log and not shard.is_loading
                for shard, scan in zip(shards, scans, strict=True)
            )
        )


@asynccontextmanager
async def followed(
    redis: Client,
    cluster_id: str,
    *,
    check_s: float = 0.05,
    idle_check_s: float = 0.05,
    bytes_max: int = 1 << 30,
) -> AsyncIterator[FollowedIndex]:
    replica = Replica(
        redis,
        cluster_id,
        bytes_max=bytes_max,
        check_s=check_s,
        idle_check_s=idle_check_s,
        pause_s=0.0,
    )
    following = asyncio.create_task(replica.run())
    try:
        yield FollowedIndex(redis, cluster_id, replica)
    finally:
        await cancel(following)


class SteppedShard:
    """A replica of shard 0 whose reads of Redis are made one at a time."""

    def __init__(self, redis: Client, cluster_id: str) -> None:
        self._reads = Replica(redis, cluster_id, bytes_max=1)
        self.shard = ShardReplica({})
        self._bucket = NUM_BUCKETS
        self._awaited: Scan | None = None

    async def begin_load(self) -> None:
        self.shard.begin_load(await self._reads.scan(0, NUM_BUCKETS, 0), now=0.0)
        self._bucket = 0
        self._awaited = None

    async def scan(self) -> None:
        """Reads a quarter of the buckets."""
        if self._bucket == NUM_BUCKETS:
            return
        scan = await self._reads.scan(0, self._bucket, NUM_BUCKETS // 4)
        self.shard.add(scan)
        self._bucket = scan.end
        if self._bucket == NUM_BUCKETS:
            self._awaited = scan
            self._check()

    async def read_log(self) -> None:
        assert self.shard.position is not None
        for entry_id, entry in await self._reads.read_log(0, self.shard.position, 0.0):
            self.shard.apply(entry_id, entry, now=0.0)
            self._check()

    async def finish(self) -> None:
        """Reads everything that is left, and compares the replica with the tree."""
        while self._bucket < NUM_BUCKETS:
            await self.scan()
        self._awaited = await self._reads.scan(0, NUM_BUCKETS, 0)
        for _ in range(100):
            self._check()
            if self._awaited is None:
                return
            await self.read_log()
        raise AssertionError("the log does not reach the tree's position")

    def _check(self) -> None:
        if self._awaited is not None and self._awaited.log == self.shard.position:
            assert self.shard.check(self._awaited) == set()
            self._awaited = None
