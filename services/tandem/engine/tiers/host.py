"""Keeps the blocks of a tier in host memory. They are lost when the process ends."""

import numpy as np

from tandem.common.kv_tiers import HOST
from tandem.engine.tiers.device.blocks import HostPages
from tandem.engine.tiers.storage import Bytes, Entry, Storage


class HostStorage(Storage):
    name = HOST

    def __init__(self, pages: HostPages, *, block_bytes: int) -> None:
        """The size of `pages` must be a multiple of `block_bytes`."""
        self._slots = pages.data.reshape(-1, block_bytes)
        self._is_device_accessible = pages.is_device_accessible
        self.num_slots = len(self._slots)

    def memory(self, slot: int) -> Bytes | None:
        return self._slots[slot] if self._is_device_accessible else None

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        if not self._has(slot, data):
            np.copyto(self._slots[slot], data)

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        if not self._has(slot, target):
            np.copyto(target, self._slots[slot])

    def forget(self) -> None:
        """Does nothing, because the storage does not record which slots hold a block. The slot pool
        does."""

    def entries(self) -> list[tuple[int, Entry]]:
        return []

    def close(self) -> None:
        """Does nothing. The memory is freed when nothing references it any more."""

    def _has(self, slot: int, data: Bytes) -> bool:
        """Returns whether `data` is the memory of the slot itself. Then the device reads or writes
        the slot directly, and no copy is needed."""
        return self._is_device_accessible and np.may_share_memory(self._slots[slot], data)
