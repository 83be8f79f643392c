"""The audit trail of a cluster: who changed what, and which calls were refused, at all routers.

    {tandem:CLUSTER}:audit:changes   STREAM, sizes, roles, drains and keys; field `entry` is JSON
    {tandem:CLUSTER}:audit:refusals  STREAM, calls without a working key or beyond their role

There are two streams because a flood of refused calls would push every change out of one. Each
keeps the last `ENTRIES_MAX` entries, and at times a few more. Entries wait in memory while Redis is
away, at most as many. Who adds an entry also logs it.
"""

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Any, Literal

import msgspec

from tandem.errors import NotNow, TandemError
from tandem.store.client import UNREACHABLE, Client

log = logging.getLogger(__name__)

ENTRIES_MAX = 1000
_RETRY_S = 1.0
_LAST_WRITE_S = 1.0  # for what waits when the router ends

Kind = Literal["changes", "refusals"]


class Caller(msgspec.Struct, frozen=True):
    """The sender of a call. A refused call's key is the one that it claims to have."""

    address: str
    key_id: str = ""
    tenant: str = ""

    def __str__(self) -> str:
        return self.address + (f", key {self.key_id} of {self.tenant}" if self.key_id else "")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change or refused call. `outcome` is done, or the code of the error that `why` tells."""

    at: float  # seconds since the epoch
    router_id: str
    caller: Caller
    what: str
    outcome: str
    before: str = ""
    after: str = ""
    why: str = ""


class AuditTrail:
    """The trail as one router writes and reads it; `run` writes what was added."""

    def __init__(self, redis: Client, cluster_id: str, *, router_id: str) -> None:
        self._redis = redis
        self._key = f"{{tandem:{cluster_id}}}:audit"
        self._router_id = router_id
        self._waiting: dict[Kind, deque[AuditEntry]] = {
            "changes": deque(maxlen=ENTRIES_MAX),
            "refusals": deque(maxlen=ENTRIES_MAX),
        }
        self._added = asyncio.Event()

    def add_change(
        self, who: Caller, what: str, before: str, after: str, error: TandemError | None = None
    ) -> None:
        """Adds a change that was made, or tried: then `error` says why it was not."""
        entry = self._entry(who, what, error)
        self._add("changes", msgspec.structs.replace(entry, before=before, after=after))

    def add_refusal(self, who: Caller, what: str, error: TandemError) -> None:
        self._add("refusals", self._entry(who, what, error))

    async def run(self) -> None:
        """Writes entries to Redis until it is cancelled; then those that still wait, if it can."""
        is_away = False
        try:
            while True:
                await self._added.wait()
                self._added.clear()
                try:
                    await self._write()
                except UNREACHABLE as error:
                    if not is_away:
                        log.warning("the audit trail waits for Redis: %r", error)
                    is_away = True
                    await asyncio.sleep(_RETRY_S)
                    self._added.set()
                else:
                    is_away = False
        finally:
            with suppress(TimeoutError, *UNREACHABLE):
                async with asyncio.timeout(_LAST_WRITE_S):
                    await self._write()

    async def read(self, num_max: int) -> list[AuditEntry]:
        """Returns the last entries of all routers, the newest first. Raises NotNow."""
        found: list[AuditEntry] = []
        try:
            for kind in self._waiting:
                told: Any = await self._redis.xrevrange(f"{self._key}:{kind}", count=num_max)
                found += [_decode(fields[b"entry"]) for _, fields in told]
        except UNREACHABLE as error:
            raise NotNow(f"the audit trail is in Redis, which is away: {error!r}") from error
        return sorted(found, key=lambda entry: entry.at, reverse=True)[:num_max]

    def _entry(self, who: Caller, what: str, error: TandemError | None) -> AuditEntry:
        return AuditEntry(
            at=time.time(),
            router_id=self._router_id,
            caller=who,
            what=what,
            outcome=error.code if error else "done",
            why=error.message if error else "",
        )

    def _add(self, kind: Kind, entry: AuditEntry) -> None:
        self._waiting[kind].append(entry)  # the oldest goes if there are too many
        self._added.set()

    async def _write(self) -> None:
        for kind, waiting in self._waiting.items():
            while waiting:
                entry = waiting.popleft()
                key, text = f"{self._key}:{kind}", msgspec.json.encode(entry)
                try:
                    await self._redis.xadd(key, {"entry": text}, maxlen=ENTRIES_MAX)
                except BaseException:
                    if len(waiting) < ENTRIES_MAX:
                        waiting.appendleft(entry)
                    raise


def _decode(text: bytes) -> AuditEntry:
    return msgspec.json.decode(text, type=AuditEntry)
