"""Compares the prefix tree in Redis with the blocks that a worker holds, and measures the tree.

This module serves audits and metrics; it is not on a request's path. Each Redis call is bounded and
delays look-ups by one or two milliseconds.

Both sides change during an audit, because recent changes of a worker are still on their way to the
tree. So a range of buckets that differs is read several times, and only a difference found in every
look counts: a working publisher publishes any change within the pauses. Two cases are no
difference. A block that is evicted and stored repeatedly: from the second look on, a block counts
as held only if it is held before and after the tree is read. A log that began between two looks:
the count of looks restarts with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.net.store.client import Client
from tandem.prefix_index.entries import NUM_BUCKETS, split_entries
from tandem.prefix_index.redis import RedisIndex, lua_script

CALL_ENTRIES = 2048  # Number of entries that one call reads, about 1 ms of Redis's time
_RANGE_ENTRIES = 32_768  # Number of entries that one comparison covers

# Returns the entries that a worker holds in the buckets from the first one up to the second.
Held = Callable[[int, int], Awaitable[set[bytes]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """Blocks that are `missing` (held, not in the tree) or `stale` (in the tree, not held)."""

    num_checked: int = 0  # entries on either side
    missing: int = 0
    stale: int = 0
    in_tree: bool = True  # whether the worker has a log in the tree
    error: str = ""  # reason if nothing could be compared

    @property
    def any(self) -> bool:
        return bool(self.missing or self.stale) or not self.in_tree

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            self.num_checked + other.num_checked,
            self.missing + other.missing,
            self.stale + other.stale,
            self.in_tree and other.in_tree,
            self.error or other.error,
        )


@dataclass(frozen=True, slots=True)
class TreeWorker:
    num_blocks: int
    silent_s: int  # seconds since its last publication; a worker publishes every second


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Sizes of all shards together. `num_bytes` is estimated from a sample."""

    num_entries: int
    num_swept: int
    num_bytes: int
    workers: dict[str, TreeWorker]


class TreeInspector:
    """Reads one cluster's tree. Redis errors propagate."""

    def __init__(
        self, redis: Client, index: RedisIndex, *, looks: int = 3, pause_s: float = 1.0
    ) -> None:
        """A difference counts if each of `looks` finds it; looks are `pause_s` apart."""
        self.looks = looks
        self.pause_s = pause_s
        self._redis = redis
        self._index = index
        self._entries = lua_script("entries")
        self._stats = lua_script("stats")

    async def audit(self, worker_id: str, held: Held, *, sample: int | None = None) -> Differences:
        """Compares all entries, or about `sample` of them from a random bucket on.

        An empty bucket counts as one entry of the sample. Errors of `held` propagate.
        """
        first = 0 if sample is None else random.randrange(NUM_BUCKETS)
        found = Differences()
        # wrap around, so that all of a small tree is compared
        for at, end in ((first, NUM_BUCKETS), (0, first)):
            while at < end and (sample is None or sample > 0):
                part, stopped = await self._compare(
                    worker_id, held, at, end, _RANGE_ENTRIES if sample is None else sample
                )
                found += part
                if sample is not None:
                    sample = sample - (end - at) if stopped == end else 0
                at = stopped
        return found

    async def stats(self) -> TreeStats:
        num_entries = num_swept = num_bytes = shard = 0
        workers: dict[str, TreeWorker] = {}
        more = 1
        while more:
            bucket = random.randrange(NUM_BUCKETS)
            reply = await self._stats(self._redis, [self._index.key(shard)], bucket)
            more, entries, swept, size = reply[:4]
            num_entries = num_entries + entries
            num_swept = num_swept + swept
            num_bytes += size
            for i in range(4, len(reply), 3):
                workers[reply[i].decode(errors="replace")] = TreeWorker(reply[i + 1], reply[i + 2])
            shard += 1
        return TreeStats(num_entries, num_swept, num_bytes, workers)

    async def _compare(
        self, worker_id: str, held: Held, first: int, end: int, entries: int
    ) -> tuple[Differences, int]:
        """Returns the lasting differences and the bucket at which the comparison stopped."""
        missing = set[bytes]()
        stale = set[bytes]()
        num_looks, was_there = 0, True  # consecutive looks that found a log, or none
        for look in range(2 * self.looks):
            before = None
            if look:
                await asyncio.sleep(self.pause_s)
                before = await held(first, end)
            said = await self._read(worker_id, first, end, entries)
            # Later looks read the same buckets in full, even if they have grown.
            entries = NUM_BUCKETS + (1 << 30)
            claimed, end = said or (set(), end)
            after = await held(first, end)
            num_looks = num_looks + 1 if (said is not None) == was_there else 1
            was_there = said is not None
            lacking = (after if before is None else before & after) - claimed
            surplus = claimed - after - (before or set())
            missing = lacking & missing if num_looks > 1 else lacking
            stale = surplus & stale if num_looks > 1 else surplus
            if num_looks == self.looks or (said and not missing and not stale):
                break
        if num_looks < self.looks:  # the log appeared and disappeared, or nothing differs
            missing = set()
            stale = set()
        return Differences(len(claimed | after), len(missing), len(stale), was_there), end

    async def _read(
        self, worker_id: str, at: int, end: int, budget: int
    ) -> tuple[set[bytes], int] | None:
        """Returns the entries in the buckets from `at` on, and the bucket after the last one read.

        It reads at most about `budget` entries. Returns None if the worker has no log.
        """
        found = await self._index.find(worker_id)
        if found is None:
            return None
        key = self._index.key(found[0])
        entries = set[bytes]()
        while at < end and budget > 0:
            part = min(budget, CALL_ENTRIES)
            reply = await self._entries(self._redis, [key], worker_id, at, end, part)
            if not reply:
                return None
            at, packed = reply
            entries |= split_entries(packed)
            budget -= part
        return entries, at
