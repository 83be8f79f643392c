"""A file store in an S3 bucket.

`create` is a conditional write (`If-None-Match: *`), which AWS, MinIO and others support.
`check_files` tries it once, because a server that ignores the condition would let two routers write
one object.
"""

from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from tandem.errors import FilesUnavailable
from tandem.net.files.store import PIECE_BYTES, StoredObject, check_name

T = TypeVar("T")
_PART_BYTES = 8 * PIECE_BYTES  # of a multipart upload; S3 wants at least 5 MiB


class BucketStore:
    def __init__(self, client: Any) -> None:
        """`client` is a store of obstore."""
        import obstore

        self._obstore = obstore
        self._client = client

    async def create(self, name: str, data: bytes) -> bool:
        exists = (self._obstore.exceptions.AlreadyExistsError, FileExistsError)
        try:
            await self._obstore.put_async(
                self._client, check_name(name), data, mode="create", use_multipart=False
            )
        except exists:
            return False
        except Exception as error:
            raise _unavailable(error) from error
        return True

    async def put(self, name: str, data: bytes) -> None:
        await _run(
            self._obstore.put_async(self._client, check_name(name), data, use_multipart=False)
        )

    async def put_stream(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        # obstore's writer completes the upload when it is closed. An upload that raises is never
        # completed, so no object appears. One part is sent at a time: a slow server would otherwise
        # fill the router's memory with parts.
        writer = self._obstore.open_writer_async(
            self._client, check_name(name), buffer_size=_PART_BYTES, max_concurrency=1
        )
        num_bytes = 0
        async for piece in pieces:
            num_bytes += len(piece)
            await _run(writer.write(piece))
        await _run(writer.close())
        return num_bytes

    async def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        options: dict[str, Any] = {}
        if length is not None:
            options = {"range": (start, start + length)}
        elif start:
            options = {"range": {"offset": start}}
        try:
            got = await self._obstore.get_async(self._client, check_name(name), options=options)
            return bytes(await got.bytes_async())
        except FileNotFoundError:
            return None
        except Exception as error:
            # A server refuses a range that begins at the object's end or after it.
            if options and (size := await self.size(name)) is not None and start >= size:
                return b""
            raise _unavailable(error) from error

    async def size(self, name: str) -> int | None:
        try:
            return int((await self._obstore.head_async(self._client, check_name(name)))["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _unavailable(error) from error

    async def objects(self, prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        try:
            below = f"{check_name(prefix)}/" if prefix else None
            async for batch in self._obstore.list(self._client, below):
                found += [
                    StoredObject(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in batch
                ]
        except Exception as error:
            raise _unavailable(error) from error
        return sorted(found, key=lambda each: each.name)

    async def delete(self, name: str) -> None:
        try:
            await self._obstore.delete_async(self._client, check_name(name))
        except FileNotFoundError:
            return
        except Exception as error:
            raise _unavailable(error) from error

    async def sweep(self, older_s: float) -> None:
        """Does nothing: a rule of the bucket ends unfinished uploads (docs/batches.md)."""


async def _run(call: Awaitable[T]) -> T:
    try:
        return await call
    except Exception as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> FilesUnavailable:
    text = str(error).partition("\n")[0][:300] or type(error).__name__
    return FilesUnavailable(f"the object store of files does not answer: {text}", retry_after_s=5.0)
