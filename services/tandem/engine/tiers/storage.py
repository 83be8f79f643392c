"""The protocol of a tier's storage: numbered slots that hold one block each, in memory, on disk or
in an object store. A tier has one storage for each KV group.

Only the tier's I/O threads call `write` and `read`. One thread writes a slot, and another thread
may read the slot only after the write has ended.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Entry(NamedTuple):
    """The block that a slot holds, or that is written to a slot."""

    block_hash: bytes
    parent_hash: bytes  # empty for the first block of a chain


class BadBlock(Exception):
    """A slot does not have the bytes that were written for this block."""


class Storage(Protocol):
    name: str  # the tier's name, from common/kv_tiers.py
    num_slots: int
    # number of slots whose block could not be recovered when the storage was opened
    num_torn: int = 0

    @property
    def is_ready(self) -> bool:
        """False for a while after a failure. The storage is neither read nor written during this
        time."""
        return True

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        """Writes the block's bytes [block_bytes] to a slot. Raises OSError; the slot is empty
        then."""

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        """Reads a slot into `target` [block_bytes]. Raises OSError or BadBlock; the content of
        `target` is undefined then."""

    def begin_write(self, slot: int, entry: Entry, data: Bytes) -> Callable[[], None]:
        """Starts a write. The returned function waits for the end of the write and raises the
        errors of `write`."""
        return partial(self.write, slot, entry, data)

    def begin_read(self, slot: int, block_hash: bytes) -> Callable[[Bytes], None]:
        """Starts a read. The returned function waits for the bytes, puts them into its argument and
        raises the errors of `read`."""
        return partial(self.read, slot, block_hash)

    def memory(self, slot: int) -> Bytes | None:
        """Returns the memory of a slot, if the device can copy to and from it. Otherwise returns
        None.

        Only a storage in page-locked memory has such slots. Their memory may also be passed to
        `write` and `read` as the buffer.
        """
        return None

    def take_lost(self) -> list[int]:
        """Returns the slots whose bytes were found to be missing since the last call."""
        return []

    def forget(self) -> None:
        """Empties all slots. A storage whose `entries` is always empty may do nothing. Raises
        OSError."""

    def entries(self) -> list[tuple[int, Entry]]:
        """Returns the slots that held a block when the storage was opened."""

    def close(self) -> None:
        """Closes the storage and frees its resources."""


@runtime_checkable
class SharedStorage(Storage, Protocol):
    """A storage that other workers also write to."""

    def look_up(self, block_hashes: Sequence[bytes], first: int) -> int:
        """Returns how many leading blocks of a chain are stored. The first `first` blocks are known
        to be stored. Raises OSError."""

    def look_up_each(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Returns, for each of these blocks, whether it is stored. Raises OSError."""
