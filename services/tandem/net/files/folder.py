"""A file store in a folder, on a local disk or a file system that all routers mount.

An object is first written to ROOT/.new and flushed to disk. `put` then renames it, and `create`
links it under its name: both are atomic, also on NFS. A crash leaves files in ROOT/.new, which
`sweep` removes. Only this process's user may use the folder.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from tandem.common.process import own_files
from tandem.errors import ConfigError, FilesUnavailable
from tandem.net.files.store import PIECE_BYTES, StoredObject, check_name

T = TypeVar("T")
_NEW = ".new"


class FolderStore:
    def __init__(self, root: Path, option: str) -> None:
        """Creates the folder. Raises ConfigError, which names the `option`, if the folder cannot be
        used, or if its file system has no hard links."""
        self._root = root
        try:
            own_files.make_folder(root)
            own_files.make_folder(root / _NEW)
            with self._written([b""]) as new:
                tried = new.with_suffix(".link")
                os.link(new, tried)
                tried.unlink()
        except OSError as error:
            raise ConfigError(f"{option} {root} cannot be used: {error}") from error

    async def create(self, name: str, data: bytes) -> bool:
        def link() -> bool:
            with self._written([data]) as new:
                try:
                    self._place(name, lambda target: os.link(new, target))
                except FileExistsError:
                    return False
            return True

        return await self._run(link)

    async def put(self, name: str, data: bytes) -> None:
        def rename() -> None:
            with self._written([data]) as new:
                self._rename(new, name)

        await self._run(rename)

    async def put_stream(self, name: str, pieces: AsyncIterator[bytes]) -> int:
        new = self._new()
        num_bytes = 0
        file = await self._run(lambda: _open_new(new))
        try:
            held = bytearray()
            async for piece in pieces:
                num_bytes += len(piece)
                held += piece
                if len(held) >= PIECE_BYTES:
                    written, held = held, bytearray()
                    await self._run(lambda written=written: file.write(written))  # type: ignore[misc]

            def finish() -> None:
                file.write(held)
                file.flush()
                os.fsync(file.fileno())
                self._rename(new, name)

            await self._run(finish)
        finally:
            file.close()
            with contextlib.suppress(OSError):
                new.unlink()
        return num_bytes

    async def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        def read() -> bytes | None:
            try:
                with self._path(name).open("rb") as file:
                    file.seek(start)
                    return file.read(-1 if length is None else length)
            except (FileNotFoundError, NotADirectoryError):
                return None

        return await self._run(read)

    async def size(self, name: str) -> int | None:
        def size() -> int | None:
            try:
                return self._path(name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

        return await self._run(size)

    async def objects(self, prefix: str) -> list[StoredObject]:
        return await self._run(lambda: sorted(self._walk(prefix), key=lambda each: each.name))

    async def delete(self, name: str) -> None:
        def unlink() -> None:
            path = self._path(name)
            path.unlink(missing_ok=True)
            # A folder goes with its last object. It may get a new object meanwhile: then it stays.
            with contextlib.suppress(OSError):
                while (path := path.parent) != self._root:
                    path.rmdir()

        await self._run(unlink)

    async def sweep(self, older_s: float) -> None:
        def sweep() -> None:
            oldest = time.time() - older_s
            for new in (self._root / _NEW).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if new.stat().st_mtime < oldest:
                        new.unlink()

        await self._run(sweep)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _new(self) -> Path:
        return self._root / _NEW / uuid.uuid4().hex

    def _rename(self, new: Path, name: str) -> None:
        self._place(name, new.rename)

    def _place(self, name: str, move: Callable[[Path], object]) -> None:
        """Moves a new file to its place, and creates the folders before it. A concurrent `delete`
        may remove these folders again, so a few attempts are made."""
        target = self._path(name)
        for is_last in (False, False, True):
            try:
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                move(target)
                _flush(target.parent)
                return
            except FileNotFoundError:
                if is_last:
                    raise

    @contextlib.contextmanager
    def _written(self, pieces: list[bytes]) -> Iterator[Path]:
        """Writes a new file, and removes it after the context unless it was renamed."""
        new = self._new()
        try:
            with _open_new(new) as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            yield new
        finally:
            with contextlib.suppress(FileNotFoundError):
                new.unlink()

    def _walk(self, prefix: str) -> Iterator[StoredObject]:
        for folder, folders, files in os.walk(self._path(prefix) if prefix else self._root):
            # Other programs leave hidden files, such as `.nfs...`. No object has such a name.
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (name for name in files if not name.startswith(".")):
                path = Path(folder, file)
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    name = str(path.relative_to(self._root))
                    yield StoredObject(name, found.st_size, found.st_mtime)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise FilesUnavailable(
                f"the folder of files cannot be used: {error.strerror or error}", retry_after_s=5.0
            ) from error


def _open_new(path: Path) -> BinaryIO:
    """Creates a file that only this process's user may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _flush(folder: Path) -> None:
    """Flushes a folder, so that a new name in it survives a crash of the machine."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
