"""Compares the prefix tree in Redis with the blocks that a worker holds, and measures the size of
the tree.

Audits and metrics use this module; requests do not. Each Redis call reads about `CALL_ENTRIES`
entries at most, so the call delays look-ups by one or two milliseconds.

When an audit reads the tree, the tree may lack a worker's latest changes. So a range of buckets
that differs is compared several times. Each comparison is called a look. In the pauses between
looks, a working publisher publishes all its changes. So a difference counts only if every look has
found it. Two special cases are handled:

- A block may be evicted and stored again between looks. So, from the second look on, a block counts
  as missing in the tree only if the worker holds the block before and after the tree is read.
- The worker may appear in the tree or disappear from it between two looks. Then looks are counted
  from 1 again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.net.store.client import Client
from tandem.prefix_index.entries import NUM_BUCKETS, split_entries
from tandem.prefix_index.redis import RedisIndex, lua_script

# Largest number of entries that one Redis call reads. Redis is busy with the call for about 1 ms.
CALL_ENTRIES = 2048
_RANGE_ENTRIES = 32_768  # number of entries that one comparison of buckets reads, approximately

# Function (first, end) that returns the entries of the blocks that a worker holds, in the buckets
# first, ..., end - 1.
Held = Callable[[int, int], Awaitable[set[bytes]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """The result of an audit of one worker: numbers of blocks."""

    # Number of compared blocks: all blocks that the worker holds or that the tree lists for it.
    num_checked: int = 0
    missing: int = 0  # number of blocks that the worker holds but that the tree does not list
    stale: int = 0  # number of blocks that the tree lists but that the worker does not hold
    in_tree: bool = True  # True: the tree knows the worker
    error: str = ""  # why the blocks could not be compared; empty if they were compared

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
    # Seconds since the worker last published a batch. A working publisher publishes every second.
    silent_s: int


@dataclass(frozen=True, slots=True)
class TreeStats:
    """The total size of all shards of the tree. `num_bytes` is estimated from a sample of
    buckets."""

    num_entries: int
    num_swept: int
    num_bytes: int
    workers: dict[str, TreeWorker]
    # Ids of the last entries of the shards' logs. They change with each change of the tree, except
    # changes by processes that may not write the log.
    position: tuple[bytes, ...] = ()


class TreeInspector:
    """Audits and measures the prefix tree of one cluster. Redis errors propagate."""

    def __init__(
        self, redis: Client, index: RedisIndex, *, looks: int = 3, pause_s: float = 1.0
    ) -> None:
        """A difference counts only if `looks` comparisons in a row find it. Comparisons are
        `pause_s` seconds apart.
        """
        self.looks = looks
        self.pause_s = pause_s
        self._redis = redis
        self._index = index
        self._entries = lua_script("entries")
        self._stats = lua_script("stats")

    async def audit(self, worker_id: str, held: Held, *, sample: int | None = None) -> Differences:
        """Compares the tree's entries of a worker with the blocks that the worker holds.

        Without `sample`, compares all entries. With `sample`, compares whole buckets from a random
        bucket on, and stops when the number of entries plus the number of buckets is about
        `sample`. Errors of `held` propagate.
        """
        first = 0 if sample is None else random.randrange(NUM_BUCKETS)
        found = Differences()
        # After the last bucket, the sample continues at bucket 0. So a sample that is larger than
        # the tree compares all buckets.
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
        position = []
        more = 1
        while more:
            bucket = random.randrange(NUM_BUCKETS)
            reply = await self._stats(self._redis, [self._index.key(shard)], bucket)
            more, entries, swept, size, log = reply[:5]
            position.append(log)
            num_entries = num_entries + entries
            num_swept = num_swept + swept
            num_bytes += size
            for i in range(5, len(reply), 3):
                workers[reply[i].decode(errors="replace")] = TreeWorker(reply[i + 1], reply[i + 2])
            shard += 1
        return TreeStats(num_entries, num_swept, num_bytes, workers, tuple(position))

    async def _compare(
        self, worker_id: str, held: Held, first: int, end: int, entries: int
    ) -> tuple[Differences, int]:
        """Compares the buckets first, ..., end - 1. Stops before `end` after about `entries`
        entries.

        Returns the differences that every look found, and the first bucket that was not compared.
        """
        missing = set[bytes]()
        stale = set[bytes]()
        # `was_there` says whether the tree knew the worker at the latest look.
        # `num_looks` is the number of looks in a row with this result.
        num_looks, was_there = 0, True
        for look in range(2 * self.looks):
            before = None
            if look:
                await asyncio.sleep(self.pause_s)
                before = await held(first, end)
            said = await self._read(worker_id, first, end, entries)
            # The first look has determined `end`. Later looks read all buckets before `end`, even
            # if the buckets have more entries by then. So the limit is now practically infinite.
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
        # The loop ended early because no difference was left, or the worker kept appearing in and
        # disappearing from the tree.
        if num_looks < self.looks:
            missing = set()
            stale = set()
        return Differences(len(claimed | after), len(missing), len(stale), was_there), end

    async def _read(
        self, worker_id: str, at: int, end: int, budget: int
    ) -> tuple[set[bytes], int] | None:
        """Reads the worker's entries in the buckets at, ..., end - 1, but stops after about
        `budget` entries. Returns the entries and the number of the first bucket that was not read.

        Returns None if the tree does not know the worker.
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
