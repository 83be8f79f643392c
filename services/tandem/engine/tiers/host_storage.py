"""A tier's slots in host memory. They end with the process."""

import numpy as np

from tandem.engine.cache.pool_memory import own_pages
from tandem.engine.tiers.storage import Bytes, Entry, Storage


class HostStorage(Storage):
    name = "host"

    def __init__(self, *, num_slots: int, block_bytes: int) -> None:
        """Raises ConfigError when there is no such memory. Pages are taken as they are written."""
        self.num_slots = num_slots
        pages = own_pages(num_slots * block_bytes)
        self._slots = np.frombuffer(pages, np.uint8).reshape(num_slots, block_bytes)

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        np.copyto(self._slots[slot], data)

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        np.copyto(target, self._slots[slot])

    def forget(self) -> None:
        """Does nothing: which slots hold a block is known to their pool alone."""

    def entries(self) -> list[tuple[int, Entry]]:
        return []

    def close(self) -> None:
        """Does nothing: the memory goes with its last user."""
