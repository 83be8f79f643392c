"""Objects with names, in a folder or in an S3 bucket, for clients' files and batches.

All routers of a cluster use the same folder or bucket. The only agreement between them is `create`,
which succeeds for one caller: a second `create` of the same name returns False. `router/batches`
builds its claims on that.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import FilesUnavailable

PIECE_BYTES = 1 << 20  # objects are read and written in pieces of about this many bytes
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class StoredObject:
    name: str
    num_bytes: int
    modified_at: float  # seconds since the epoch, on the store's clock


class FileStore(Protocol):
    """Each method raises FilesUnavailable if the store fails. Writes are atomic: a reader sees all
    bytes of an object or no object. A name has parts of letters, digits, `.`, `_` and `-` between
    slashes, and no part starts with a dot."""

    async def create(self, name: str, data: bytes) -> bool:
        """Writes an object. Returns False, and writes nothing, if the name exists."""

    async def put(self, name: str, data: bytes) -> None:
        """Writes an object, and replaces an older one with this name."""

    async def put_stream(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        """Writes an object piece by piece, and returns its size. If `pieces` raises, nothing is
        written."""

    async def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Returns at most `length` bytes of an object from byte `start` on, or None if there is no
        such object."""

    async def size(self, name: str) -> int | None:
        """Returns the bytes of an object, or None if there is no such object."""

    async def objects(self, prefix: str) -> list[StoredObject]:
        """Returns the objects whose names start with `prefix`/, sorted by name; "": all objects."""

    async def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""

    async def sweep(self, older_s: float) -> None:
        """Deletes unfinished writes that are older than this."""


def check_name(name: str) -> str:
    """Returns `name`. A name never comes from a client, so another one is an error of ours."""
    assert _NAME.fullmatch(name), name
    return name


async def pieces_of(store: FileStore, name: str) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of an object. Raises FilesUnavailable if the object ends too early, because
    it was deleted meanwhile."""
    size = await store.size(name)
    start = 0
    while size is None or start < size:
        piece = None if size is None else await store.read(name, start, PIECE_BYTES)
        if not piece:
            raise FilesUnavailable(f"the object {name} of the file store was deleted")
        start += len(piece)
        yield piece
