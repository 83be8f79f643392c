"""The protocol of a tier's bytes: numbered slots of a block each, in memory, on disk or in a store.

Only the tier's IO threads call `write` and `read`. A slot is written by one thread, and read by
another only after its write has ended.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Entry(NamedTuple):
    """A block that is written to a slot."""

    block_hash: bytes
    parent_hash: bytes  # empty: it is the first of its chain


class BadBlock(Exception):
    """A slot does not have the bytes that were written there for this block."""


class Storage(Protocol):
    name: str  # of the tier, from common/kv_tiers.py
    num_slots: int
    num_torn: int = 0  # slots whose block was not known any more when the storage was opened

    @property
    def is_ready(self) -> bool:
        """False: it failed lately, so nothing is written there or read for a while."""
        return True

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        """Fills a slot. Raises OSError; the slot holds nothing then."""

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        """Fills `target` with a slot's bytes. Raises OSError or BadBlock; `target` holds anything
        then."""

    def begin_write(self, slot: int, entry: Entry, data: Bytes) -> Callable[[], None]:
        """Begins with a write; what is returned ends it, and raises as `write` does."""
        return partial(self.write, slot, entry, data)

    def begin_read(self, slot: int, block_hash: bytes) -> Callable[[Bytes], None]:
        """Begins with a read; what is returned fills a target, and raises as `read` does."""
        return partial(self.read, slot, block_hash)

    def memory(self, slot: int) -> Bytes | None:
        """Returns a slot's own bytes if the device copies from and to them by itself. `write` and
        `read` may be given them."""
        return None

    def take_lost(self) -> list[int]:
        """Returns the slots that are known to have lost their bytes since the last call."""
        return []

    def forget(self) -> None:
        """Empties all slots. Raises OSError."""

    def entries(self) -> list[tuple[int, Entry]]:
        """Returns what the slots held when the storage was opened."""

    def close(self) -> None:
        """Lets the storage go."""


@runtime_checkable
class SharedStorage(Storage, Protocol):
    """A storage that other workers write to, so that it has more than this worker knows."""

    def look_up(self, block_hashes: Sequence[bytes], first: int) -> int:
        """Returns how many first blocks of a chain are there; `first` of them are known to be.
        Raises OSError."""

    def look_up_each(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Returns which of these blocks are there. Raises OSError."""
