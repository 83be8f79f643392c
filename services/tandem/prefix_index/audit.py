"""Compares the prefix tree in Redis with the blocks that a worker holds, and measures the size of
the tree.

Audits and metrics use this module; requests do not. Each Redis call reads at most `CALL_ENTRIES`
entries, so it delays look-ups by one or two milliseconds.

A worker's latest changes may not have reached the tree when an audit reads it. So if a range of
buckets differs, it is compared several times ("looks"), with pauses in which a working publisher
publishes all its changes. Only a difference found in every look counts. Two special cases must not
count:

- A block is evicted and stored repeatedly. So, from the second look on, a block counts as held only
  if the worker holds it both before and after the tree is read.
- The worker's log in the tree began between two looks. Then the looks are counted from 1 again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.net.store.client import Client
from tandem.prefix_index.entries import NUM_BUCKETS, split_entries
from tandem.prefix_index.redis import RedisIndex, lua_script

# largest number of entries that one Redis call reads, in about 1 ms of Redis's time
CALL_ENTRIES = 2048
_RANGE_ENTRIES = 32_768  # number of entries that one comparison covers

# held(first, end) returns the entries of the blocks that a worker holds, for the buckets from
# `first` up to `end`, `end` excluded.
Held = Callable[[int, int], Awaitable[set[bytes]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """Numbers of blocks that differ between a worker and the tree.

    The worker holds `missing` blocks that are not in the tree. The tree has `stale` blocks that the
    worker does not hold.
    """

    num_checked: int = 0  # number of blocks that the worker holds or the tree has for the worker
    missing: int = 0
    stale: int = 0
    in_tree: bool = True  # True: the worker has a log in the tree
    error: str = ""  # the reason why nothing could be compared; empty: no error

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
    silent_s: int  # seconds since the worker's last publication; at most 1 for a working publisher


@dataclass(frozen=True, slots=True)
class TreeStats:
    """The sizes of all shards of the tree together. `num_bytes` is an estimate from a sample of
    buckets."""

    num_entries: int
    num_swept: int
    num_bytes: int
    workers: dict[str, TreeWorker]


class TreeInspector:
    """Audits and measures one cluster's tree. Redis errors propagate."""

    def __init__(
        self, redis: Client, index: RedisIndex, *, looks: int = 3, pause_s: float = 1.0
    ) -> None:
        """An audit compares each range of buckets up to `looks` times, with pauses of `pause_s`
        seconds.

        Only a difference that all of these comparisons find is counted.
        """
        self.looks = looks
        self.pause_s = pause_s
        self._redis = redis
        self._index = index
        self._entries = lua_script("entries")
        self._stats = lua_script("stats")

    async def audit(self, worker_id: str, held: Held, *, sample: int | None = None) -> Differences:
        """Compares all entries of a worker with the blocks that it holds. With `sample`, compares
        only about this many entries, from a random bucket on.

        Each bucket counts as one more entry of the sample. Errors of `held` propagate.
        """
        first = 0 if sample is None else random.randrange(NUM_BUCKETS)
        found = Differences()
        # The sample continues at bucket 0 after the last bucket, so a small tree is compared whole.
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
        """Compares the buckets from `first` up to `end`, without `end`. Stops when about `entries`
        entries were read.

        Returns the differences that every look found, and the bucket at which the next comparison
        starts.
        """
        missing = set[bytes]()
        stale = set[bytes]()
        # `was_there`: whether the last look found the worker's log in the tree. `num_looks`: number
        # of consecutive looks with this result.
        num_looks, was_there = 0, True
        for look in range(2 * self.looks):
            before = None
            if look:
                await asyncio.sleep(self.pause_s)
                before = await held(first, end)
            said = await self._read(worker_id, first, end, entries)
            # Later looks read the same buckets to the end, even if the buckets have grown, so they
            # need no limit on the number of entries.
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
        # no difference was left, or the looks disagreed whether there is a log
        if num_looks < self.looks:
            missing = set()
            stale = set()
        return Differences(len(claimed | after), len(missing), len(stale), was_there), end

    async def _read(
        self, worker_id: str, at: int, end: int, budget: int
    ) -> tuple[set[bytes], int] | None:
        """Reads the worker's entries in the buckets from `at` on. Returns the entries and the
        bucket after the last one read.

        Stops at `end`, or after about `budget` entries. Returns None if the worker has no log in
        the tree.
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
