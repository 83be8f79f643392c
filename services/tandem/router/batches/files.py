"""Clients' files: their records, the quota of a tenant, and their expiry."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from tandem.errors import FileTooLarge, FileUnknown, QuotaExceeded
from tandem.net.files.store import FileStore, pieces_of
from tandem.router.batches.records import (
    FileRecord,
    Purpose,
    file_name,
    file_record_name,
    is_file_id,
    new_file_id,
    tenant_folder,
)

FILES_MAX = 10_000  # number of files of one tenant
_RECORDS_KEPT = 4096  # a router remembers this many records
_READS_AT_ONCE = 16


class Files:
    """The files of all tenants. Each method raises FilesUnavailable if the store fails."""

    def __init__(
        self, store: FileStore, *, expire_s: float, file_bytes_max: int, tenant_bytes_max: int
    ) -> None:
        self.store = store
        self.expire_s = expire_s
        self.file_bytes_max = file_bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._records: OrderedDict[str, FileRecord] = OrderedDict()  # by name in the store
        self._arriving: dict[str, int] = {}  # tenant -> bytes of uploads that have not ended

    async def receive(self, tenant: str, pieces: AsyncIterator[bytes]) -> tuple[str, int]:
        """Writes the bytes of a new file, which has no record yet. Returns its id and size. Raises
        FileTooLarge and QuotaExceeded."""
        file_id = new_file_id()
        used = await self._used(tenant)

        async def bounded() -> AsyncIterator[bytes]:
            num_bytes = 0
            try:
                async for piece in pieces:
                    num_bytes += len(piece)
                    self._arriving[tenant] = self._arriving.get(tenant, 0) + len(piece)
                    self._check_size(num_bytes, used + self._arriving[tenant])
                    yield piece
            finally:
                self._arriving[tenant] = left = self._arriving.get(tenant, 0) - num_bytes
                if left <= 0:
                    del self._arriving[tenant]

        num_bytes = await self.store.put_stream(file_name(tenant, file_id), bounded())
        # Uploads that ended meanwhile, here or at other routers, were not in `used`.
        try:
            self._check_size(num_bytes, await self._used(tenant, num_new=1))
        except QuotaExceeded:
            await self.discard(tenant, file_id)
            raise
        return file_id, num_bytes

    def _check_size(self, num_bytes: int, of_tenant: int) -> None:
        if num_bytes > self.file_bytes_max:
            raise FileTooLarge(f"a file may have at most {self.file_bytes_max} bytes", param="file")
        if 0 < self._tenant_bytes_max < of_tenant:
            raise QuotaExceeded(
                f"your files may have at most {self._tenant_bytes_max} bytes together; delete some "
                "files",
                param="file",
            )

    async def add(
        self,
        tenant: str,
        file_id: str,
        *,
        filename: str,
        purpose: Purpose,
        num_bytes: int,
        expire_s: float,
    ) -> FileRecord:
        """Makes a file of the bytes that `receive` or a batch has written."""
        now = time.time()
        record = FileRecord(
            file_id=file_id,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=now + expire_s,
        )
        await self.store.put(file_record_name(tenant, file_id), msgspec.json.encode(record))
        return record

    async def find(self, tenant: str, file_id: str) -> FileRecord:
        """Returns a file of the tenant. Raises FileUnknown."""
        record = None
        if is_file_id(file_id):
            record = await self._record(file_record_name(tenant, file_id), is_cached=False)
        if record is None or record.expires_at <= time.time():
            # These are OpenAI's first words, too.
            raise FileUnknown(f"No such File object: {file_id[:80]}", param="id")
        return record

    async def of_tenant(self, tenant: str) -> list[FileRecord]:
        """Returns the files of the tenant, oldest first."""
        prefix = f"{tenant_folder(tenant)}/records"
        names = [each.name for each in await self.store.objects(prefix)]
        found: list[FileRecord | None] = []
        for at in range(0, len(names), _READS_AT_ONCE):
            some = names[at : at + _READS_AT_ONCE]
            found += await asyncio.gather(*(self._record(name, is_cached=True) for name in some))
        now = time.time()
        live = [record for record in found if record is not None and record.expires_at > now]
        return sorted(live, key=lambda record: (record.created_at, record.file_id))

    def content(self, tenant: str, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a file."""
        return pieces_of(self.store, file_name(tenant, record.file_id))

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises FileUnknown."""
        await self.find(tenant, file_id)
        await self.store.delete(file_record_name(tenant, file_id))
        await self.discard(tenant, file_id)

    async def discard(self, tenant: str, file_id: str) -> None:
        """Deletes the bytes of a file that has no record."""
        self._records.pop(file_record_name(tenant, file_id), None)
        await self.store.delete(file_name(tenant, file_id))

    async def _used(self, tenant: str, num_new: int = 0) -> int:
        """Returns the bytes of the tenant's files, of which `num_new` are new. Raises QuotaExceeded
        if there are too many others."""
        found = await self.store.objects(f"{tenant_folder(tenant)}/files")
        if len(found) - num_new >= FILES_MAX:
            raise QuotaExceeded(
                f"you have {len(found)} files, which is the maximum; delete some files",
                param="file",
            )
        return sum(each.num_bytes for each in found)

    async def _record(self, name: str, *, is_cached: bool) -> FileRecord | None:
        """Reads a record. `is_cached`: a record that was read before need not be read again,
        because its name is known to exist."""
        if is_cached and name in self._records:
            self._records.move_to_end(name)
            return self._records[name]
        data = await self.store.read(name)
        if data is None:
            self._records.pop(name, None)
            return None
        self._records[name] = record = msgspec.json.decode(data, type=FileRecord)
        while len(self._records) > _RECORDS_KEPT:
            self._records.popitem(last=False)
        return record
