"""Looks into the tree in Redis: what it says of one worker, and how large it is.

For audits and metrics; nothing here is on a request's path. Each call is bounded, so that it holds
up look-ups for a millisecond or two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tandem.prefix_index.entries import NUM_BUCKETS, split_entries
from tandem.prefix_index.redis import RedisIndex
from tandem.store.client import Client
from tandem.store.script import Script

_LUA = Path(__file__).parent / "lua"
CALL_ENTRIES = 2048  # looked at in one call, about 1 ms of Redis's time


@dataclass(frozen=True, slots=True)
class TreeRange:
    """What the tree says a worker holds in the buckets from `first` on and before `end`."""

    first: int
    end: int
    entries: set[bytes]


@dataclass(frozen=True, slots=True)
class TreeWorker:
    num_blocks: int
    silent_s: int  # since it last published; a worker does so each second


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Of all shards together; `num_bytes` is measured on a sample."""

    num_entries: int
    num_swept: int
    num_bytes: int
    workers: dict[str, TreeWorker]


class TreeInspector:
    def __init__(self, redis: Client, index: RedisIndex) -> None:
        self._redis = redis
        self._index = index
        self._entries, self._stats = (
            Script((_LUA / f"{name}.lua").read_text()) for name in ("entries", "stats")
        )

    async def read(self, worker_id: str, first: int, end: int, budget: int) -> TreeRange | None:
        """At most about `budget` entries are looked at; the range that is answered may end sooner.

        None for a worker that has no log in the tree.
        """
        found = await self._index.find(worker_id)
        if found is None:
            return None
        key, at, entries = self._index.key(found[0]), first, set[bytes]()
        while at < end and budget > 0:
            part = min(budget, CALL_ENTRIES)
            reply = await self._entries(self._redis, [key], worker_id, at, end, part)
            if not reply:
                return None
            at, packed = reply
            entries |= split_entries(packed)
            budget -= part
        return TreeRange(first, at, entries)

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
                workers[reply[i].decode()] = TreeWorker(reply[i + 1], reply[i + 2])
            shard += 1
        return TreeStats(num_entries, num_swept, num_bytes, workers)
