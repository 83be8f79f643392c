"""One suite for every file store: a folder, a bucket in memory, and a bucket of an S3 server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tandem.common.config.files import FileOptions
from tandem.errors import ConfigError, FilesUnavailable
from tandem.net.files.bucket import BucketStore
from tandem.net.files.folder import FolderStore
from tandem.net.files.open import check_files, open_files
from tandem.net.files.store import PIECE_BYTES, FileStore, pieces_of

DATA = bytes(range(256)) * 40


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "files", "files-url")
        return
    obstore_store = pytest.importorskip("obstore.store")
    if request.param == "memory":
        yield BucketStore(obstore_store.MemoryStore())
        return
    pytest.importorskip("moto")
    from tests.harness.object_store import BUCKET, ObjectStoreServer

    server = ObjectStoreServer(tmp_path)
    credentials = tmp_path / "credentials"
    credentials.touch(0o600)
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    opened = open_files(
        FileOptions(
            files_url=f"s3://{BUCKET}/some/prefix",
            files_endpoint=server.url,
            files_region="us-east-1",
            files_credentials=str(credentials),
        )
    )
    assert opened is not None
    yield opened
    server.kill()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_create_succeeds_once(store: FileStore) -> None:
    made = await asyncio.gather(*(store.create("a/b", f"{n}".encode()) for n in range(8)))
    assert sorted(made) == [False] * 7 + [True]
    assert await store.read("a/b") == f"{made.index(True)}".encode()
    await store.put("a/b", b"other")
    assert await store.read("a/b") == b"other"
    assert not await store.create("a/b", b"again")
    await store.delete("a/b")
    assert await store.read("a/b") is None
    assert await store.create("a/b", b"again")


async def test_reads(store: FileStore) -> None:
    await store.put("x", DATA)
    assert await store.size("x") == len(DATA)
    assert await store.read("x", 10, 20) == DATA[10:30]
    assert await store.read("x", len(DATA) - 5) == DATA[-5:]
    assert await store.read("x", len(DATA) - 5, 100) == DATA[-5:]
    assert await store.read("x", len(DATA), 100) == b""
    assert await store.read("y") is None
    assert await store.read("y", 3, 4) is None
    assert await store.size("y") is None
    await store.delete("y")
    await store.put("empty", b"")
    assert await store.read("empty", 0, 10) == b""


async def test_streams(store: FileStore) -> None:
    large = DATA * (9 * PIECE_BYTES // len(DATA))
    assert await store.put_stream("big", pieces(large, b"", b"end")) == len(large) + 3
    assert b"".join([piece async for piece in pieces_of(store, "big")]) == large + b"end"
    assert await store.put_stream("none", pieces()) == 0
    assert [piece async for piece in pieces_of(store, "none")] == []
    with pytest.raises(FilesUnavailable, match="was deleted"):
        _ = [piece async for piece in pieces_of(store, "unknown")]


async def test_a_stream_that_fails_writes_nothing(store: FileStore) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield DATA
        raise ValueError("broken")

    await store.put("kept", b"old")
    for name in ("kept", "new"):
        with pytest.raises(ValueError, match="broken"):
            await store.put_stream(name, broken())
    assert await store.read("kept") == b"old"
    assert [each.name for each in await store.objects("")] == ["kept"]


async def test_lists(store: FileStore) -> None:
    for name in ("a/1", "a/b/2", "ab/3", "c"):
        await store.put(name, name.encode())
    assert [each.name for each in await store.objects("a")] == ["a/1", "a/b/2"]
    everything = await store.objects("")
    assert [each.name for each in everything] == ["a/1", "a/b/2", "ab/3", "c"]
    assert [each.num_bytes for each in everything] == [3, 5, 4, 1]
    assert await store.objects("missing") == []
    await store.delete("a/1")
    assert [each.name for each in await store.objects("a")] == ["a/b/2"]
    await check_files(store, "url")


async def test_a_store_without_conditions_is_refused(tmp_path: Path) -> None:
    class Careless(FolderStore):
        async def create(self, name: str, data: bytes) -> bool:
            await self.put(name, data)
            return True

    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        await check_files(Careless(tmp_path, "files-url"), "s3://b")


async def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"files-url .*/file cannot be used"):
        FolderStore(tmp_path / "file", "files-url")
    store = FolderStore(tmp_path / "files", "files-url")
    await store.put("a", b"x")
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "files" / "a").stat().st_mode & 0o777 == 0o600
    # NFS and other programs leave hidden files, which are no objects.
    (tmp_path / "files" / ".nfs01").touch()
    assert [each.name for each in await store.objects("")] == ["a"]
    left = tmp_path / "files" / ".new" / "left"
    left.touch()
    await store.sweep(3600)
    assert left.exists()
    await store.sweep(-1)
    assert not left.exists()
    for wrong in ("../a", "a/../b", ".new/a", "/a", "a//b"):
        with pytest.raises(AssertionError):
            await store.read(wrong)


def test_options() -> None:
    assert open_files(FileOptions()) is None
    with pytest.raises(ConfigError, match="files-region is set, but files-url is not s3"):
        FileOptions(files_url="/tmp/x", files_region="us-east-1")
    with pytest.raises(ConfigError, match=r"files-url is .* it must be s3://BUCKET"):
        open_files(FileOptions(files_url="s3://"))
