"""Keeps the blocks of a tier in a file on disk. After a restart, the worker finds them again
through the manifest.

The storage uses plain POSIX reads and writes, because their errors name a cause, such as a full
disk. Nothing is synced to the disk: syncing would cost more than the loss of blocks in a power
failure. Each block has a checksum over its hash and its sealed bytes (seal.py), which is compared
when the block is read.

The storages of a model's KV groups share a folder. Each storage has its own file of blocks and its
own manifest in the folder.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import xxhash

from tandem.common.kv_tiers import DISK
from tandem.engine.tiers.disk.folder import DiskFolder, claim
from tandem.engine.tiers.disk.manifest import (
    HEADER_BYTES,
    RECORD_BYTES,
    Manifest,
    has_header,
    header,
)
from tandem.engine.tiers.seal import Seal
from tandem.engine.tiers.storage import BadBlock, Bytes, Entry, Storage
from tandem.errors import ConfigError

log = logging.getLogger(__name__)


class DiskStorage(Storage):
    def __init__(
        self,
        path: Path,
        *,
        bytes_max: int,
        block_bytes: int,
        identity: str,
        seal: Seal,
        group: int = 0,
        folder: DiskFolder | None = None,
        name: str = DISK,
        option: str = "kv-disk-path",
    ) -> None:
        """`identity` names everything on which the KV depends. `folder` is the folder that the
        storage of the first KV group uses. Without `folder`, the storage claims one below `path`.
        `name` is the tier's name, and `option` the option that set `path`, which errors name.
        Raises ConfigError."""
        self.name = name
        self._seal = seal
        block_bytes += seal.num_extra_bytes
        self.num_slots = (bytes_max - HEADER_BYTES) // (block_bytes + RECORD_BYTES)
        assert self.num_slots > 0, "no block fits"
        self._block_bytes = block_bytes
        own = header(f"{identity} {seal.name}", block_bytes)
        blocks, manifest = (f"{file}-{group}" if group else file for file in ("blocks", "manifest"))
        if folder is not None:
            self.folder = folder.duplicate()
        else:
            self.folder = claim(path, lambda each: has_header(each / manifest, own), option)
        try:
            self._file = self.folder.open(blocks)
            if not has_header(self.folder.path / manifest, own):
                # Frees the disk space of another model's blocks before anything is written.
                os.ftruncate(self._file, 0)
                if folder is None:
                    # Removes the files that the folder's former model had for its other KV groups.
                    self.folder.drop("blocks-*", "manifest-*")
            self._manifest = Manifest(self.folder.open(manifest), self.num_slots, own)
            found, self.num_torn = self._manifest.read()
            num_whole = os.fstat(self._file).st_size // block_bytes
            os.ftruncate(self._file, self.num_slots * block_bytes)
            for slot, _, _ in found:
                if slot >= num_whole:  # the bytes of this slot were truncated or deleted
                    self._manifest.clear_slot(slot)
                    self.num_torn += 1
            found = [each for each in found if each[0] < num_whole]
        except OSError as error:
            raise ConfigError(f"{option} {self.folder.path} cannot be used: {error}") from error
        self._lost: SimpleQueue[int] = SimpleQueue()
        self._checksums = np.zeros(self.num_slots, np.uint64)
        for slot, _, checksum in found:
            self._checksums[slot] = checksum
        self._entries = [(slot, entry) for slot, entry, _ in found]
        log.info(
            "KV tier %s in %s: %d blocks can be used, %d damaged blocks are dropped",
            name,
            self.folder.path,
            len(found),
            self.num_torn,
        )

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        if self._checksums[slot]:
            self._manifest.clear_slot(slot)
            self._checksums[slot] = 0
        # Must come before the write, which could make a truncated file longer again and so hide the
        # loss.
        self._find_lost()
        sealed = self._seal.seal(entry.block_hash, data)
        checksum = _checksum(entry.block_hash, sealed)
        self._move(os.pwrite, slot, sealed)
        self._manifest.write(slot, entry, checksum)
        self._checksums[slot] = checksum

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        sealed = self._seal.buffer(target)
        try:
            self._move(_pread, slot, sealed)
            if _checksum(block_hash, sealed) != self._checksums[slot]:
                raise BadBlock("the checksum of the block does not match")
            self._seal.open(block_hash, sealed, target)
        except BadBlock:
            self._find_lost()
            raise

    def take_lost(self) -> list[int]:
        return [self._lost.get_nowait() for _ in range(self._lost.qsize())]

    def _find_lost(self) -> None:
        """Checks whether another process has truncated the file. If so, the slots beyond the file's
        end are lost, and `take_lost` returns them.

        Raises OSError.
        """
        num_whole = os.fstat(self._file).st_size // self._block_bytes
        if num_whole >= self.num_slots:
            return
        os.ftruncate(self._file, self.num_slots * self._block_bytes)
        lost = [int(slot) + num_whole for slot in np.flatnonzero(self._checksums[num_whole:])]
        self._checksums[num_whole:] = 0
        log.warning(
            "another process truncated the file of KV blocks in %s; %d blocks are lost",
            self.folder.path,
            len(lost),
        )
        for slot in lost:
            self._manifest.clear_slot(slot)
            self._lost.put(slot)

    def forget(self) -> None:
        self._checksums[:] = 0
        self._manifest.clear()

    def entries(self) -> list[tuple[int, Entry]]:
        return self._entries

    def close(self) -> None:
        os.close(self._file)
        self._manifest.close()
        self.folder.close()

    def _move(self, move: Callable[[int, memoryview, int], int], slot: int, data: Bytes) -> None:
        left = data.data
        at = slot * self._block_bytes
        while left:
            num_bytes = move(self._file, left, at)
            if not num_bytes:
                raise BadBlock("the file of KV blocks is too short")
            left = left[num_bytes:]
            at += num_bytes


def _pread(file: int, target: memoryview, at: int) -> int:
    return os.preadv(file, [target], at)


def _checksum(block_hash: bytes, data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data, int.from_bytes(block_hash[:8], "little")) or 1
