"""Opens the file store of --files-url."""

import uuid
from pathlib import Path

from tandem.common.config.files import FileOptions
from tandem.errors import ConfigError, FilesUnavailable
from tandem.net.files.bucket import BucketStore
from tandem.net.files.folder import FolderStore
from tandem.net.files.store import FileStore
from tandem.net.object_store import StoreAddress, open_store

_REQUEST_S = 30.0
_RETRIES = 3


def open_files(options: FileOptions) -> FileStore | None:
    """Returns the file store, or None if --files-url is not set. Raises ConfigError."""
    if not options.files_url:
        return None
    if not options.in_bucket:
        return FolderStore(Path(options.files_url).expanduser().absolute(), "files-url")
    address = StoreAddress(
        "files",
        options.files_url,
        options.files_endpoint,
        options.files_region,
        options.files_credentials,
    )
    return BucketStore(open_store(address, request_s=_REQUEST_S, retries=_RETRIES))


async def check_files(store: FileStore, url: str) -> None:
    """Raises ConfigError if the store writes one name twice, and FilesUnavailable if it fails."""
    name = f"check/{uuid.uuid4().hex}"
    try:
        if not await store.create(name, b"1"):
            raise FilesUnavailable(f"files-url {url}: the store has the new name {name}")
        if await store.create(name, b"2"):
            raise ConfigError(
                f"files-url {url}: the store ignores If-None-Match, so two routers could write one "
                "result twice; use a store with conditional writes, or a folder"
            )
    finally:
        await store.delete(name)
