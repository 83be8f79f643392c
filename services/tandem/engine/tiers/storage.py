"""The protocol of a tier's bytes: numbered slots of one block each, in memory or on disk.

Only the tier's IO threads call `write` and `read`. A slot is written by one thread, and read by
another only after its write has ended.
"""

from typing import NamedTuple, Protocol

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
    name: str  # of the tier, in metrics
    num_slots: int
    num_torn: int  # slots whose block was not known any more when the storage was opened

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        """Fills a slot. Raises OSError; the slot holds nothing then."""

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        """Fills `target` with a slot's bytes. Raises OSError or BadBlock; `target` holds anything
        then."""

    def forget(self) -> None:
        """Empties all slots. Raises OSError."""

    def entries(self) -> list[tuple[int, Entry]]:
        """Returns what the slots held when the storage was opened."""

    def close(self) -> None:
        """Lets the storage go."""
