"""A tier's slots in host memory. They end with the process."""

import numpy as np

from tandem.common.kv_tiers import HOST
from tandem.engine.tiers.device.blocks import HostPages
from tandem.engine.tiers.storage import Bytes, Entry, Storage


class HostStorage(Storage):
    name = HOST

    def __init__(self, pages: HostPages, *, block_bytes: int) -> None:
        """`pages` have room for whole blocks."""
        self._slots = pages.data.reshape(-1, block_bytes)
        self._is_reached = pages.is_reached
        self.num_slots = len(self._slots)

    def memory(self, slot: int) -> Bytes | None:
        return self._slots[slot] if self._is_reached else None

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        if not self._has(slot, data):
            np.copyto(self._slots[slot], data)

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        if not self._has(slot, target):
            np.copyto(target, self._slots[slot])

    def forget(self) -> None:
        """Does nothing: which slots hold a block is known to their pool alone."""

    def entries(self) -> list[tuple[int, Entry]]:
        return []

    def close(self) -> None:
        """Does nothing: the memory goes with its last user."""

    def _has(self, slot: int, data: Bytes) -> bool:
        """Returns whether these bytes are the slot's own, which the device reads and writes."""
        return self._is_reached and np.may_share_memory(self._slots[slot], data)
