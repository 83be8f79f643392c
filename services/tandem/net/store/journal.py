"""Redis streams of limited length, whose entries outlive the processes that write them.

While Redis is unreachable, new entries wait in memory, at most ENTRIES_MAX for each stream. Several
processes may observe the same event: for example, all routers see a worker leave. Each of these
processes adds an entry with the same `once` key. The first entry is written. Other entries with the
same key are dropped for an hour.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tandem.errors import NotNow
from tandem.net.store.client import UNREACHABLE, UNREADABLE, Client
from tandem.net.store.script import Script

log = logging.getLogger(__name__)

ENTRIES_MAX = 1000
_RETRY_S = 1.0
_LAST_WRITE_S = 1.0  # maximum seconds for writing the waiting entries when the process ends
_ONCE_MS = 3600 * 1000

# Adds an entry to a stream. For an entry with a `once` key, the script sets a mark, which is a key
# in Redis. If the mark exists already, the entry is not added.
#
# KEYS[1]   the stream
# KEYS[2]   the mark
# ARGV[1]   the entry as JSON
# ARGV[2]   number of entries that the stream keeps
# ARGV[3]   time to live of the mark in milliseconds; 0: the entry has no `once` key
# returns   nothing
_ADD = Script("""
if ARGV[3] ~= '0' and not redis.call('SET', KEYS[2], '1', 'NX', 'PX', ARGV[3]) then return end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'entry', ARGV[1])
""")


class Journal:
    """One process's access to the streams `PREFIX:NAME`. `add` queues an entry, and `run` writes
    the queued entries."""

    def __init__(self, redis: Client, prefix: str, names: Sequence[str], what: str) -> None:
        """`what` is the name of the journal in log messages and errors."""
        self._redis = redis
        self._prefix = prefix
        self._what = what
        self._waiting: dict[str, deque[tuple[bytes, str]]] = {
            name: deque(maxlen=ENTRIES_MAX) for name in names
        }
        self._added = asyncio.Event()

    def add(self, name: str, entry: msgspec.Struct, once: str = "") -> None:
        """Queues an entry for the stream `name`. If too many entries wait, the oldest waiting entry
        is dropped. Of all entries with the same `once` key, only one is written."""
        self._waiting[name].append((msgspec.json.encode(entry), once))
        self._added.set()

    async def run(self) -> None:
        """Writes queued entries to Redis until the call is cancelled. Then writes the entries that
        are still queued, if Redis answers in time."""
        is_away = False
        try:
            while True:
                await self._added.wait()
                self._added.clear()
                try:
                    await self._write()
                except UNREACHABLE as error:
                    if not is_away:
                        log.warning(
                            "Redis does not answer (%r). New entries of %s wait in memory "
                            "until Redis answers again",
                            error,
                            self._what,
                        )
                    is_away = True
                    await asyncio.sleep(_RETRY_S)
                    self._added.set()
                else:
                    is_away = False
        finally:
            with suppress(TimeoutError, *UNREACHABLE):
                async with asyncio.timeout(_LAST_WRITE_S):
                    await self._write()

    async def read(self, name: str, num_max: int, decode: Callable[[bytes], Any]) -> list[Any]:
        """Returns the latest entries of all processes, newest first.

        Entries that this version of Tandem cannot read are skipped. Raises NotNow if Redis is
        unreachable.
        """
        try:
            replies: Any = await self._redis.xrevrange(self._key(name), count=num_max)
        except UNREACHABLE as error:
            raise NotNow(
                f"{self._what} cannot be read: Redis does not answer: {error!r}"
            ) from error
        found = []
        for _, fields in replies:
            with suppress(KeyError, *UNREADABLE):
                found.append(decode(fields[b"entry"]))
        return found

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _write(self) -> None:
        for name, waiting in self._waiting.items():
            while waiting:
                text, once = waiting.popleft()
                keys = [self._key(name), f"{self._key(name)}:once:{once}"]
                try:
                    await _ADD(self._redis, keys, text, ENTRIES_MAX, _ONCE_MS if once else 0)
                except BaseException:
                    if len(waiting) < ENTRIES_MAX:
                        waiting.appendleft((text, once))
                    raise
