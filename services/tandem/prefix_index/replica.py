"""A router's replica of the prefix tree: look-ups without a round trip to Redis.

Redis remains the source of truth. A replica starts from it, and any number of routers have one. The
replica follows each shard (redis.py) with a task, which repeats these steps:

1. At the start, every `CHECK_S` while the log grows, and every `IDLE_CHECK_S` while it does not, it
   reads the shard's workers and the id of the log's last entry (lua/scan.lua). When the replica has
   applied this entry, it must have as many blocks of each worker as the tree. A worker with another
   number is loaded again.
2. While workers are loading, it reads some buckets of the shard (lua/scan.lua).
3. It reads the next entries of the log and applies them. Without a load, the call waits in Redis
   for an entry. After a reply that has all entries, the task pauses for `PAUSE_S`, so that a busy
   log costs few calls.

If the log does not continue at the replica's position, the whole shard is loaded again. This
happens if the replica was too slow and the log was trimmed, if Redis was restarted without its
data, and after a fail-over to a Redis replica that lacks the last entries. Look-ups use the
previous generations meanwhile (shard_replica.py).

`match` returns None, and the router asks Redis, in these cases:

- A shard is not loaded yet.
- A shard has a worker of an older version, which writes no log, or an entry of the log was lost.
- Redis has not answered for `STALE_S`.
- The replica would take more than `bytes_max`. Then it stops for `RETRY_S`.
- _replica_table.c could not be compiled, or `bytes_max` is 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tandem.common.backoff import Backoff, doubling_at_random
from tandem.common.process.cancellation import cancel
from tandem.net.store.client import UNREACHABLE, Client
from tandem.prefix_index.entries import NUM_BUCKETS
from tandem.prefix_index.redis import SHARDS_MAX, lua_script, shard_key
from tandem.prefix_index.shard_replica import (
    IS_COMPILED,
    LOST,
    Generations,
    LogBroken,
    Scan,
    ShardReplica,
    WorkerGeneration,
)

log = logging.getLogger(__name__)

CHECK_S = 1.0
IDLE_CHECK_S = 5.0
# Longest wait in Redis for an entry of the log. A server that has vanished is noticed when the call
# times out.
WAIT_S_MAX = 1.0
PAUSE_S = 0.02
STALE_S = 30.0
RETRY_S = 600.0
# A call reads this many entries and buckets at most. Redis is busy with the call for about 1 ms.
_SCAN_ENTRIES = 2048
# A call reads this many entries of the log at most: 4,096 blocks, which are applied in about 1 ms.
_LOG_ENTRIES = 16
_SWEPT_PARTS = 16  # parts of a table that are swept in each step


class Replica:
    """The replica of a cluster's prefix tree. `run` keeps it in step with Redis."""

    def __init__(
        self,
        redis: Client,
        cluster_id: str,
        *,
        bytes_max: int,
        on_delay: Callable[[float], None] = lambda delay_s: None,
        check_s: float = CHECK_S,
        idle_check_s: float = IDLE_CHECK_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`redis` needs a connection for each shard, in which calls wait. `on_delay` is called with
        the seconds from each change of the tree to its application here."""
        self._redis = redis
        self._cluster_id = cluster_id
        self._bytes_max = bytes_max
        self.on_delay = on_delay
        self.check_s = check_s
        self.idle_check_s = idle_check_s
        self.pause_s = pause_s
        self._generations: Generations = {}
        self._scan = lua_script("scan")
        self._followers: list[_Follower] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_too_large = asyncio.Event()
        self.num_loads = 0  # number of times that a shard, or some of its workers, were loaded

    @property
    def shards(self) -> list[ShardReplica]:
        return [each.shard for each in self._followers]

    @property
    def num_entries(self) -> int:
        return sum(shard.table.num_entries for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.table.num_bytes for shard in self.shards)

    @property
    def silent_s(self) -> float:
        """Seconds since Redis's last answer, for the shard where this is longest."""
        now = time.monotonic()
        return max((now - each.answered_at for each in self._followers), default=0.0)

    @property
    def is_usable(self) -> bool:
        return (
            bool(self._followers)
            and all(each.shard.is_usable for each in self._followers)
            and self.silent_s <= STALE_S
        )

    def match(self, block_hashes: Sequence[bytes], *, closed: bool) -> dict[str, int] | None:
        """Returns the result of `PrefixIndex.match`, or None if Redis must be asked."""
        if not self.is_usable:
            return None
        depths: dict[str, int] = {}
        for each in self._followers:
            for worker_id, depth in each.shard.match(block_hashes, closed=closed).items():
                depths[worker_id] = max(depth, depths.get(worker_id, 0))
        return depths

    def generations(self, worker_id: str) -> tuple[WorkerGeneration, ...]:
        """Returns what the replica knows of the worker's logs."""
        return tuple(self._generations.get(worker_id, ()))

    def drop(self, generations: Iterable[WorkerGeneration]) -> None:
        """Drops those of the generations that were not dropped yet."""
        for each in generations:
            if each in self._generations.get(each.worker_id, ()):
                each.shard.drop(each)

    async def run(self) -> None:
        """Follows the tree until the task is cancelled."""
        if not IS_COMPILED:
            log.warning(
                "the compiled module _replica_table is missing, so this router asks Redis for each "
                "prompt; install a C compiler, and then install tandem-llm again"
            )
        if not IS_COMPILED or not self._bytes_max:
            await asyncio.Event().wait()
        while True:
            try:
                self._follow_next()
                await self._is_too_large.wait()
                log.warning(
                    "the replica of the prefix tree takes more than %d bytes; this router asks "
                    "Redis instead, and tries again in %g s",
                    self._bytes_max,
                    RETRY_S,
                )
            finally:
                await cancel(*self._tasks)
                self._tasks.clear()
                self._followers.clear()
                self._generations.clear()
                self._is_too_large.clear()
            await asyncio.sleep(RETRY_S)

    def _follow_next(self) -> None:
        """Starts to follow the first shard that is not followed yet."""
        number = len(self._followers)

        def on_next() -> None:
            if len(self._followers) == number + 1 < SHARDS_MAX:
                self._follow_next()

        follower = _Follower(self, number, ShardReplica(self._generations), on_next)
        self._followers.append(follower)
        name = f"replica of shard {number}"
        self._tasks.add(asyncio.create_task(follower.run(), name=name))

    async def scan(self, shard: int, bucket: int, limit: int) -> Scan:
        """Reads a shard's workers, and about `limit` entries and buckets from `bucket` on."""
        key = shard_key(self._cluster_id, shard)
        return Scan.of(await self._scan(self._redis, [key], bucket, limit))

    async def read_log(
        self, shard: int, position: bytes, wait_s: float
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Reads the next entries of a shard's log. If there are none, waits for one."""
        key = f"{shard_key(self._cluster_id, shard)}:log"
        wait_ms = round(wait_s * 1e3) or None
        found: Any = await self._redis.xread(
            {key: position or b"0"}, count=_LOG_ENTRIES, block=wait_ms
        )
        return [entry for _, entries in found for entry in entries]

    def check_size(self) -> None:
        if self.num_bytes > self._bytes_max:
            self._is_too_large.set()


class _Follower:
    """Keeps the replica of one shard in step with Redis, as the text of this module says. Times are
    monotonic seconds."""

    def __init__(
        self, replica: Replica, number: int, shard: ShardReplica, on_next: Callable[[], None]
    ) -> None:
        """`on_next` is called when the tree has a shard after this one."""
        self._replica = replica
        self._number = number
        self.shard = shard
        self._on_next = on_next
        self.answered_at = time.monotonic()  # time of Redis's last answer
        self._check_at = 0.0  # time of the next check
        # The replica is compared with this scan when it has applied the scan's last log entry.
        self._awaited: Scan | None = None
        self._bucket = NUM_BUCKETS  # next bucket of a load; NUM_BUCKETS: all were read
        self._load_at = 0.0  # no load begins earlier
        self._between_loads = Backoff(doubling_at_random(0.2, 60.0))
        self._clock_ahead_s = 0.0  # time by which Redis's clock is ahead of this machine's

    async def run(self) -> None:
        retries = Backoff(doubling_at_random(0.1, 1.0))
        has_failed = False
        while True:
            try:
                await self._step()
                retries.reset()
                has_failed = False
            except LogBroken:
                self._load_all_again()
            except UNREACHABLE as error:
                if not has_failed:
                    log.warning("the prefix tree's log cannot be read; trying again: %r", error)
                has_failed = True
                self._check_at = 0.0  # the server may be another one, with other data
                await asyncio.sleep(retries.next_s())
            except Exception:
                log.exception("the replica of a shard of the prefix tree failed; loading it again")
                self.shard.is_loaded = False
                self._load_all_again()
                await asyncio.sleep(retries.next_s())

    def _load_all_again(self) -> None:
        self.shard.position = None
        self._awaited = None
        self._bucket = NUM_BUCKETS

    async def _step(self) -> None:
        if self.shard.position is None:
            await self._begin_load()
            if self.shard.position is None:
                return
        elif self._awaited is None and not self._is_loading and self._check_at <= time.monotonic():
            self._check_at = time.monotonic() + self._replica.idle_check_s
            self._awaited = await self._read(NUM_BUCKETS, 0)
        if self._is_loading:
            scan = await self._read(self._bucket, _SCAN_ENTRIES)
            self.shard.add(scan)
            self._bucket = scan.end
            if not self._is_loading:
                self._awaited = scan
        self._check_if_reached()
        await self._follow_log()
        self.shard.expire(time.monotonic())
        self.shard.sweep(_SWEPT_PARTS)
        self._replica.check_size()

    @property
    def _is_loading(self) -> bool:
        return self._bucket < NUM_BUCKETS

    async def _begin_load(self) -> None:
        await asyncio.sleep(max(0.0, self._load_at - time.monotonic()))
        scan = await self._read(NUM_BUCKETS, 0)
        if scan.log == LOST:
            self.shard.is_loaded = False  # the replica would miss changes
            await asyncio.sleep(self._replica.check_s)
        else:
            self._load(scan)

    def _load(self, scan: Scan, worker_ids: Collection[str] | None = None) -> None:
        now = time.monotonic()
        self.shard.begin_load(scan, now, worker_ids)
        if any(worker.num_blocks for worker in scan.workers):
            self._bucket = 0
        else:
            self._awaited = scan  # there is nothing to read
        self._load_at = now + self._between_loads.next_s()
        self._replica.num_loads += 1

    async def _read(self, bucket: int, limit: int) -> Scan:
        before_s = time.time()
        scan = await self._replica.scan(self._number, bucket, limit)
        self._clock_ahead_s = scan.now_ms / 1e3 - (before_s + time.time()) / 2
        self.answered_at = time.monotonic()
        if scan.has_next:
            self._on_next()
        return scan

    def _check_if_reached(self) -> None:
        """Compares the replica with the awaited scan if it has reached the scan's position."""
        while (scan := self._awaited) is not None and scan.log == self.shard.position:
            self._awaited = None
            wrong = self.shard.check(scan)
            if not wrong:
                self._between_loads.reset()
            elif self._load_at <= time.monotonic():
                log.warning(
                    "the replica of the prefix tree differs from the tree in blocks of %s, and "
                    "loads them again",
                    ", ".join(sorted(wrong)),
                )
                self._load(scan, wrong)

    async def _follow_log(self) -> None:
        """Applies the next entries of the log. Raises LogBroken if it does not continue."""
        assert self.shard.position is not None
        is_behind = self._is_loading or self._awaited is not None
        left_s = self._check_at - time.monotonic()
        wait_s = 0.0 if is_behind else min(max(0.001, left_s), WAIT_S_MAX)
        entries = await self._replica.read_log(self._number, self.shard.position, wait_s)
        self.answered_at = now = time.monotonic()
        if entries:
            self._check_at = min(self._check_at, now + self._replica.check_s)
        redis_now_s = time.time() + self._clock_ahead_s
        for entry_id, entry in entries:
            self.shard.apply(entry_id, entry, now)
            written_s = int(entry_id.partition(b"-")[0]) / 1e3
            self._replica.on_delay(max(0.0, redis_now_s - written_s))
            self._check_if_reached()
        if len(entries) == _LOG_ENTRIES:
            await asyncio.sleep(0)  # more may wait
        elif self._awaited is not None and not self._is_loading:
            # The awaited entry is older than this reply, which has the rest of the log.
            raise LogBroken
        elif entries and not is_behind:
            await asyncio.sleep(self._replica.pause_s)
