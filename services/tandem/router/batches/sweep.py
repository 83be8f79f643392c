"""Deletes files and batches that have expired, and what killed routers have left."""

import time
from collections.abc import Iterable, Mapping

import msgspec

from tandem.net.files.store import FileStore
from tandem.router.batches.records import (
    OPEN,
    SWEEPS,
    BatchRecord,
    FileRecord,
    batch_record_name,
)

SWEEP_S = 900.0
LEFT_S = 24 * 3600.0  # bytes without a record are deleted after this time: an upload is shorter


class Sweeper:
    """Every router may sweep at any time, because nothing is deleted that another one still
    needs."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        # Records never change, so each is read once: name -> the record.
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}

    async def is_due(self, now: float | None = None) -> bool:
        """Returns whether this router should sweep now: once in SWEEP_S, one router lists the whole
        store. Raises FilesUnavailable."""
        now = time.time() if now is None else now
        return await self._store.create(f"{SWEEPS}/{int(now // SWEEP_S)}", b"")

    async def sweep(self, now: float | None = None) -> int:
        """Returns the number of deleted objects. Raises FilesUnavailable."""
        now = time.time() if now is None else now
        await self._store.sweep(LEFT_S)
        found = {each.name: each.modified_at for each in await self._store.objects("")}
        await self._read(found)
        open_records = set(_open_records(found))
        in_use = {
            (name.split("/")[0], batch.input_file_id)
            for name, batch in self._batches.items()
            if name in open_records
        }
        gone: list[str] = []
        for name, modified_at in found.items():
            folder, kind, *rest = (*name.split("/"), "")
            if kind == "records":
                is_used = (folder, rest[0]) in in_use
                file = self._files.get(name)
                if file is not None and file.expires_at <= now and not is_used:
                    gone += [name, f"{folder}/files/{rest[0]}"]
            elif kind == "files":
                if f"{folder}/records/{rest[0]}" not in found and modified_at < now - LEFT_S:
                    gone.append(name)
            elif kind in ("batches", "ends", "logs"):
                record = batch_record_name(folder, rest[0])
                batch = self._batches.get(record)
                is_expired = batch is None and modified_at < now - LEFT_S
                is_expired |= batch is not None and batch.expires_at <= now
                if is_expired and record not in open_records:
                    gone.append(name)
            elif folder == SWEEPS:
                if modified_at < now - LEFT_S:
                    gone.append(name)
            elif folder == OPEN:
                record = next(iter(_open_records([name])))
                if record not in self._batches and modified_at < now - LEFT_S:
                    gone.append(name)
        # The record of a batch goes last: as long as it exists, a client can ask for the batch.
        for name in sorted(set(gone), key=lambda name: "/batches/" in name):
            await self._store.delete(name)
            self._files.pop(name, None)
            self._batches.pop(name, None)
        return len(gone)

    async def _read(self, found: Mapping[str, float]) -> None:
        self._files = {name: each for name, each in self._files.items() if name in found}
        self._batches = {name: each for name, each in self._batches.items() if name in found}
        for name in found:
            is_file, is_batch = "/records/" in name, "/batches/" in name
            if not (is_file or is_batch) or name in self._files or name in self._batches:
                continue
            if (data := await self._store.read(name)) is None:
                continue
            if is_file:
                self._files[name] = msgspec.json.decode(data, type=FileRecord)
            else:
                self._batches[name] = msgspec.json.decode(data, type=BatchRecord)


def _open_records(names: Iterable[str]) -> Iterable[str]:
    """Yields the names of the records of open batches, from the names in the folder `open`."""
    for name in names:
        if name.startswith(f"{OPEN}/"):
            batch_id, _, folder = name.partition("/")[2].partition(".")
            yield batch_record_name(folder, batch_id)
