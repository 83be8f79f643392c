"""Chooses the router that runs the batches of a cluster, without Redis.

    runner/00000007   a router took over the batches with term 7; written by `create`, so by one
    runner/beat       "7 RANDOM" of the router that runs batches; it changes every BEAT_S

A router takes over, with the next term, if the beat has not changed for LOST_S on the router's own
clock. So clocks of machines are never compared. The beat only decides when a router takes over. Two
routers may both run batches for a moment, and the logs of the batches keep their results apart
(log.py).

A router beats only while there are batches to run. When there are none, it releases its place. So
the router that gets the next batch runs it at once, and the others need not look often.
"""

import time
import uuid
from collections.abc import Callable

from tandem.net.files.store import FileStore

BEAT_S = 3.0
LOST_S = 12.0
_FOLDER = "runner"
_BEAT = f"{_FOLDER}/beat"
_RELEASED = "released"  # the text of the beat of a router that has stopped


class Leader:
    """One router's view of who runs the batches. Methods raise FilesUnavailable."""

    def __init__(
        self, store: FileStore, clock: Callable[[], float] = time.monotonic, lost_s: float = LOST_S
    ) -> None:
        self._store = store
        self._clock = clock
        self._lost_s = lost_s
        self._seen = b""  # the last beat of another router
        self._seen_at: float | None = None
        self._written_at = -BEAT_S
        self.term = 0  # the term of this router; 0: another router runs the batches

    async def lead(self) -> bool:
        """Returns whether this router runs the batches. Takes over if the other router is lost."""
        terms = await self._terms()
        latest = max(terms, default=0)
        if self.term and self.term < latest:
            self.term = 0
            self._seen_at = None
        if not self.term and await self._is_lost(latest):
            if not await self._store.create(f"{_FOLDER}/{latest + 1:08}", b""):
                return False
            self.term = latest + 1
            self._written_at = -BEAT_S
            for term in terms:
                await self._store.delete(f"{_FOLDER}/{term:08}")
        if self.term and self._clock() - self._written_at >= BEAT_S:
            await self._beat(uuid.uuid4().hex)
        return self.term > 0

    async def rest(self) -> None:
        """Says that there are no batches, so that no router beats."""
        self._seen_at = None
        await self.release()

    async def release(self) -> None:
        """Lets another router take over at once."""
        if self.term:
            await self._beat(_RELEASED)
            self.term = 0

    async def _is_lost(self, latest: int) -> bool:
        beat = await self._store.read(_BEAT) or b""
        if not latest or beat == f"{latest} {_RELEASED}".encode():
            return True
        now = self._clock()
        if self._seen_at is None or beat != self._seen:
            self._seen, self._seen_at = beat, now
        return now - self._seen_at >= self._lost_s

    async def _terms(self) -> list[int]:
        names = [each.name.rpartition("/")[2] for each in await self._store.objects(_FOLDER)]
        return sorted(int(name) for name in names if name.isdecimal())

    async def _beat(self, text: str) -> None:
        await self._store.put(_BEAT, f"{self.term} {text}".encode())
        self._written_at = self._clock()
