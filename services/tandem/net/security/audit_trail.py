"""The audit trail of a cluster: changes and refused calls at all routers.

  stream in Redis                  entries
  {tandem:CLUSTER}:audit:changes   changes of pool sizes, roles, drains and keys
  {tandem:CLUSTER}:audit:refusals  calls without a valid key, or with a key whose role is not enough

Each entry has the field `entry`, which is JSON. There are two streams, so that many refused calls
do not evict the changes. Each stream keeps about the last `ENTRIES_MAX` entries. This module does
not write to the process's log. The callers of `add_change` and `add_refusal` log the event. In
texts from clients, characters that are not printable are escaped.
"""

import time
from typing import Literal

import msgspec

from tandem.common.printable import printable
from tandem.errors import TandemError
from tandem.net.store.client import Client
from tandem.net.store.journal import ENTRIES_MAX, Journal

__all__ = ["ENTRIES_MAX", "AuditEntry", "AuditTrail", "Caller"]

Kind = Literal["changes", "refusals"]


class Caller(msgspec.Struct, frozen=True):
    """The sender of a call. `key_id` and `tenant` belong to the API key whose id the call gave. If
    the call was refused, they are only claimed: the call may have given a wrong secret."""

    address: str
    key_id: str = ""
    tenant: str = ""

    def __str__(self) -> str:
        return self.address + (f", key {self.key_id} of {self.tenant}" if self.key_id else "")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change or refused call. `outcome` is "done" or an error code. `why` is the error
    message."""

    at: float  # seconds since the epoch
    router_id: str
    caller: Caller
    what: str
    outcome: str
    before: str = ""
    after: str = ""
    why: str = ""


class AuditTrail:
    """One router's access to the audit trail. `add_change` and `add_refusal` queue an entry, and
    `run` writes the queued entries."""

    def __init__(self, redis: Client, cluster_id: str, *, router_id: str) -> None:
        kinds: tuple[Kind, ...] = ("changes", "refusals")
        self._kinds = kinds
        prefix = f"{{tandem:{cluster_id}}}:audit"
        self._journal = Journal(redis, prefix, kinds, "the audit trail")
        self._router_id = router_id

    def add_change(
        self, who: Caller, what: str, before: str, after: str, error: TandemError | None = None
    ) -> None:
        """Adds a change. If `error` is given, the entry says that the change failed with this
        error."""
        entry = self._entry(who, what, error)
        states = {"before": printable(before), "after": printable(after)}
        self._journal.add("changes", msgspec.structs.replace(entry, **states))

    def add_refusal(self, who: Caller, what: str, error: TandemError) -> None:
        self._journal.add("refusals", self._entry(who, what, error))

    async def run(self) -> None:
        """Writes queued entries to Redis until the call is cancelled. Then writes the entries that
        are still queued, if Redis answers in time."""
        await self._journal.run()

    async def read(self, num_max: int) -> list[AuditEntry]:
        """Reads the last entries of all routers, newest first. Raises NotNow."""
        found = [entry for kind in self._kinds for entry in await self.read_kind(kind, num_max)]
        return sorted(found, key=lambda entry: entry.at, reverse=True)[:num_max]

    async def read_kind(self, kind: Kind, num_max: int) -> list[AuditEntry]:
        """Reads the last entries of one kind, newest first. Raises NotNow."""
        return await self._journal.read(kind, num_max, _decode)

    def _entry(self, who: Caller, what: str, error: TandemError | None) -> AuditEntry:
        return AuditEntry(
            at=time.time(),
            router_id=self._router_id,
            caller=msgspec.structs.replace(who, address=printable(who.address)),
            what=printable(what),
            outcome=error.code if error else "done",
            why=printable(error.message) if error else "",
        )


def _decode(text: bytes) -> AuditEntry:
    return msgspec.json.decode(text, type=AuditEntry)
