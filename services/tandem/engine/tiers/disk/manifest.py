"""The manifest of a tier on disk: a file that records which block each slot of the file `blocks`
holds.

It has a header of 4096 bytes with the format and the identity of the KV, and then a record of 48
bytes for each slot:

    block hash, 16 | parent hash, 16 | checksum of the block's bytes, 8 | checksum of the record, 8

A slot's record is cleared before the slot's bytes change, and written after the new bytes. So if
the process is killed, no record names bytes that were only partly written. After a power failure
this may still happen, and the checksums detect it.
"""

import json
import os
import struct
from pathlib import Path

import xxhash

from tandem.engine.tiers.storage import Entry

HEADER_BYTES = 4096
_RECORD = struct.Struct("<16s16sQQ")
RECORD_BYTES = _RECORD.size
_CLEAR = bytes(RECORD_BYTES)
_NO_HASH = bytes(16)
_FORMAT = 1


def header(identity: str, block_bytes: int) -> bytes:
    """Returns the header of a manifest. `identity` names everything on which the KV depends, such
    as the model and the data types."""
    fields = {"format": _FORMAT, "identity": identity, "block_bytes": block_bytes}
    return json.dumps(fields).encode().ljust(HEADER_BYTES)


def has_header(path: Path, expected: bytes) -> bool:
    """Returns whether a manifest has this header. Does not follow a symbolic link and does not
    block on a pipe."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, "rb") as stream:
            return stream.read(HEADER_BYTES) == expected
    except OSError:
        return False


class Manifest:
    """An open manifest with records for `num_slots` slots."""

    def __init__(self, file: int, num_slots: int, expected: bytes) -> None:
        """Opens the manifest in `file`, and clears it if its header is not `expected`. Raises
        OSError."""
        self._file = file
        self._num_slots = num_slots
        self._header = expected
        if os.pread(file, HEADER_BYTES, 0) != expected:
            self.clear()
        else:
            os.ftruncate(file, HEADER_BYTES + num_slots * RECORD_BYTES)

    def clear(self) -> None:
        """Clears all slots. Raises OSError."""
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, HEADER_BYTES + self._num_slots * RECORD_BYTES)
        os.pwrite(self._file, self._header, 0)

    def write(self, slot: int, entry: Entry, checksum: int) -> None:
        """Records which block a slot holds, and the checksum of its bytes. Raises OSError."""
        parent = entry.parent_hash or _NO_HASH
        record = _RECORD.pack(entry.block_hash, parent, checksum, 0)[:-8]
        self._put(slot, record + xxhash.xxh3_64_intdigest(record, slot).to_bytes(8, "little"))

    def clear_slot(self, slot: int) -> None:
        """Records that a slot is empty. Raises OSError."""
        self._put(slot, _CLEAR)

    def read(self) -> tuple[list[tuple[int, Entry, int]], int]:
        """Returns (slot, entry, checksum of the bytes) for each slot that holds a block, and the
        number of torn records: those whose own checksum is wrong.

        Raises OSError.
        """
        found = []
        num_torn = 0
        at = HEADER_BYTES
        data = bytearray()
        while chunk := os.pread(self._file, 1 << 20, at):
            data += chunk
            at += len(chunk)
        whole = len(data) // RECORD_BYTES * RECORD_BYTES
        for slot, record in enumerate(_RECORD.iter_unpack(memoryview(data)[:whole])):
            block_hash, parent_hash, checksum, own = record
            if not own and block_hash == _NO_HASH:
                continue
            first = slot * RECORD_BYTES
            if xxhash.xxh3_64_intdigest(bytes(data[first : first + RECORD_BYTES - 8]), slot) != own:
                num_torn += 1
                continue
            entry = Entry(block_hash, b"" if parent_hash == _NO_HASH else parent_hash)
            found.append((slot, entry, checksum))
        return found, num_torn

    def close(self) -> None:
        os.close(self._file)

    def _put(self, slot: int, record: bytes) -> None:
        os.pwrite(self._file, record, HEADER_BYTES + slot * RECORD_BYTES)
