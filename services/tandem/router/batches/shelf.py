"""Batches as clients see them: created, read, listed and cancelled. Any router does this, whichever
router runs the batches."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from tandem.errors import BatchUnknown, NotNow, QueueFull
from tandem.net.files.store import FileStore
from tandem.router.batches.log import BatchLog, ClaimLost
from tandem.router.batches.records import (
    OPEN,
    BatchEnd,
    BatchRecord,
    batch_end_name,
    batch_record_name,
    is_batch_id,
    log_prefix,
    open_name,
    tenant_folder,
)

OPEN_MAX = 256  # number of batches of one tenant that have not ended
_LOGS_KEPT = 256
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch at one moment. `end` has what is known so far if the batch has not ended."""

    record: BatchRecord
    status: Status
    end: BatchEnd


class Batches:
    """The batches of all tenants. Each method raises FilesUnavailable if the store fails."""

    def __init__(self, store: FileStore, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called when a batch was created or cancelled here."""
        self._store = store
        self._on_change = on_change
        self._logs: OrderedDict[str, BatchLog] = OrderedDict()

    async def create(self, record: BatchRecord) -> BatchView:
        """Adds a batch. Raises QueueFull if the tenant has too many open ones."""
        open_ids = await self.open_ids(record.tenant)
        if len(open_ids) >= OPEN_MAX:
            raise QueueFull(
                f"{len(open_ids)} of your batches have not ended, which is the maximum; wait for "
                "one, or cancel one",
                retry_after_s=60.0,
            )
        # A runner ignores this name until the record exists.
        await self._store.put(open_name(record.tenant, record.batch_id), b"")
        name = batch_record_name(tenant_folder(record.tenant), record.batch_id)
        await self._store.put(name, msgspec.json.encode(record))
        self._on_change()
        return await self.find(record.tenant, record.batch_id)

    async def find(self, tenant: str, batch_id: str) -> BatchView:
        """Returns a batch of the tenant. Raises BatchUnknown."""
        record = await self._record(tenant, batch_id)
        if record is None or record.expires_at <= time.time():
            raise BatchUnknown(f"No batch found with id '{batch_id[:80]}'.", param="id")
        return await self._view(record)

    async def page(
        self, tenant: str, after: str | None, limit: int
    ) -> tuple[list[BatchView], bool]:
        """Returns at most `limit` batches of the tenant, newest first, that are older than the
        batch `after`, and whether there are more."""
        prefix = f"{tenant_folder(tenant)}/batches"
        ids = sorted(
            (each.name.rpartition("/")[2] for each in await self._store.objects(prefix)),
            reverse=True,
        )
        ids = [batch_id for batch_id in ids if after is None or batch_id < after]
        found: list[BatchView] = []
        for batch_id in ids:
            if len(found) == limit:
                return found, True
            record = await self._record(tenant, batch_id)
            if record is not None and record.expires_at > time.time():
                found.append(await self._view(record))
        return found, False

    async def cancel(self, tenant: str, batch_id: str) -> BatchView:
        """Cancels a batch. Raises BatchUnknown, and NotNow if the batch has ended."""
        view = await self.find(tenant, batch_id)
        if view.status in ("validating", "in_progress"):
            with contextlib.suppress(ClaimLost):  # the batch has ended meanwhile
                await self._log(view.record).append("cancel")
            self._on_change()
            view = await self.find(tenant, batch_id)
        if view.status not in ("cancelling", "cancelled"):
            # These are OpenAI's first words, too.
            raise NotNow(
                f"Cannot cancel a batch with status '{view.status}'. A batch can be cancelled "
                "while it is validating or in_progress"
            )
        return view

    async def uses(self, tenant: str, file_id: str) -> str:
        """Returns the id of an open batch that reads this file; "" if there is none."""
        for batch_id in await self.open_ids(tenant):
            record = await self._record(tenant, batch_id)
            if record is not None and record.input_file_id == file_id:
                return batch_id
        return ""

    async def open_ids(self, tenant: str) -> list[str]:
        """Returns the ids of the tenant's batches that have not ended."""
        suffix = f".{tenant_folder(tenant)}"
        names = [each.name for each in await self._store.objects(OPEN)]
        return [n.partition("/")[2].removesuffix(suffix) for n in names if n.endswith(suffix)]

    async def _record(self, tenant: str, batch_id: str) -> BatchRecord | None:
        if not is_batch_id(batch_id):
            return None
        data = await self._store.read(batch_record_name(tenant_folder(tenant), batch_id))
        return None if data is None else msgspec.json.decode(data, type=BatchRecord)

    async def _view(self, record: BatchRecord) -> BatchView:
        if (end := await read_end(self._store, record)) is not None:
            self._logs.pop(record.batch_id, None)
            return BatchView(record, end.status, end)
        progress = await self._log(record).refresh()
        closed = progress.closed
        status: Status = "validating"
        if closed is not None:
            status = "finalizing" if closed.why != "failed" else "validating"
        elif progress.cancelling_at:
            status = "cancelling"
        elif progress.begun_at:
            status = "in_progress"
        end = BatchEnd(
            status="completed",  # not used: the batch has no end yet
            begun_at=progress.begun_at,
            cancelling_at=progress.cancelling_at,
            finalizing_at=closed.at if closed is not None else 0.0,
            total=progress.total,
            completed=progress.num_completed,
            failed=progress.num_failed,
        )
        return BatchView(record, status, end)

    def _log(self, record: BatchRecord) -> BatchLog:
        log = self._logs.pop(record.batch_id, None)
        if log is None:
            log = BatchLog(self._store, log_prefix(record.tenant, record.batch_id))
        self._logs[record.batch_id] = log
        while len(self._logs) > _LOGS_KEPT:
            self._logs.popitem(last=False)
        return log


async def read_end(store: FileStore, record: BatchRecord) -> BatchEnd | None:
    data = await store.read(batch_end_name(record.tenant, record.batch_id))
    return None if data is None else msgspec.json.decode(data, type=BatchEnd)


class OpenBatches:
    """Reads the records of all open batches, each record once."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._known: dict[str, BatchRecord] = {}  # by the name in the folder `open`

    async def read(self) -> list[BatchRecord]:
        """Returns the records, oldest first. Raises FilesUnavailable."""
        names = [each.name for each in await self._store.objects(OPEN)]
        self._known = {name: self._known[name] for name in names if name in self._known}
        for name in names:
            if name not in self._known:
                batch_id, _, folder = name.partition("/")[2].partition(".")
                data = await self._store.read(batch_record_name(folder, batch_id))
                if data is not None:
                    self._known[name] = msgspec.json.decode(data, type=BatchRecord)
        return [self._known[name] for name in names if name in self._known]
