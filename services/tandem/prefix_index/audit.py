"""Looks into the tree in Redis: whether it says what a worker really holds, and how large it is.

For audits and metrics; nothing here is on a request's path. Each call of Redis is bounded, so that
it holds up look-ups for a millisecond or two.

Both sides of an audit change meanwhile: what a worker stored or evicted a moment ago is on its way
to the tree. So a range of buckets in which they differ is read again, and only what differs at each
look counts: a publisher that lives is done with anything within the pauses. A block that is evicted
and comes back all the time is no difference: from the second look on a block is held only if it is
before and after the tree is read. Nor is a log that has begun between two looks: the looks at its
entries begin with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.net.store.client import Client
from tandem.prefix_index.entries import NUM_BUCKETS, split_entries
from tandem.prefix_index.redis import RedisIndex, lua_script

CALL_ENTRIES = 2048  # looked at in one call, about 1 ms of Redis's time
_RANGE_ENTRIES = 32_768  # of one comparison

# What a worker holds from one bucket on and before another, as entries.
Held = Callable[[int, int], Awaitable[set[bytes]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """Blocks that are `missing` (held, not in the tree) or `stale` (in the tree, not held)."""

    num_checked: int = 0  # entries that either side has
    missing: int = 0
    stale: int = 0
    in_tree: bool = True  # whether the worker has a log there at all
    error: str = ""  # why nothing could be compared

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
    silent_s: int  # since it last published; a worker does so each second


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Figures of all shards together; `num_bytes` is measured on a sample."""

    num_entries: int
    num_swept: int
    num_bytes: int
    workers: dict[str, TreeWorker]


class TreeInspector:
    """One cluster's tree. Errors of Redis pass through."""

    def __init__(
        self, redis: Client, index: RedisIndex, *, looks: int = 3, pause_s: float = 1.0
    ) -> None:
        """A difference that is there at each of `looks`, `pause_s` apart, is one."""
        self.looks, self.pause_s = looks, pause_s
        self._redis = redis
        self._index = index
        self._entries, self._stats = lua_script("entries"), lua_script("stats")

    async def audit(self, worker_id: str, held: Held, *, sample: int | None = None) -> Differences:
        """Compares all entries, or about `sample` (empty buckets counted in) from a random bucket
        on. Errors of `held` pass through."""
        first = 0 if sample is None else random.randrange(NUM_BUCKETS)
        found = Differences()
        for at, end in ((first, NUM_BUCKETS), (0, first)):  # so that a small tree is seen whole
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
            num_entries, num_swept = num_entries + entries, num_swept + swept
            num_bytes += size
            for i in range(4, len(reply), 3):
                workers[reply[i].decode(errors="replace")] = TreeWorker(reply[i + 1], reply[i + 2])
            shard += 1
        return TreeStats(num_entries, num_swept, num_bytes, workers)

    async def _compare(
        self, worker_id: str, held: Held, first: int, end: int, entries: int
    ) -> tuple[Differences, int]:
        """Returns the differences that stayed, and the bucket that the comparison ended before."""
        missing, stale = set[bytes](), set[bytes]()
        num_looks, was_there = 0, True  # looks in a row at a log, or at none
        for look in range(2 * self.looks):
            before = None
            if look:
                await asyncio.sleep(self.pause_s)
                before = await held(first, end)
            said = await self._read(worker_id, first, end, entries)
            # Buckets that filled up since the first look are read all the same.
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
        if num_looks < self.looks:  # its log comes and goes, or nothing differs
            missing, stale = set(), set()
        return Differences(len(claimed | after), len(missing), len(stale), was_there), end

    async def _read(
        self, worker_id: str, at: int, end: int, budget: int
    ) -> tuple[set[bytes], int] | None:
        """Returns the hashes in the buckets from `at` on, and the bucket after the last of them.

        It looks at about `budget` entries at most. None: the worker has no log there.
        """
        found = await self._index.find(worker_id)
        if found is None:
            return None
        key, entries = self._index.key(found[0]), set[bytes]()
        while at < end and budget > 0:
            part = min(budget, CALL_ENTRIES)
            reply = await self._entries(self._redis, [key], worker_id, at, end, part)
            if not reply:
                return None
            at, packed = reply
            entries |= split_entries(packed)
            budget -= part
        return entries, at
