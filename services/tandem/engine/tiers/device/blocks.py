"""The protocol by which the threads of tiers reach the blocks of a pool.

    write   mark ... begin_out --> on its way --> bytes on the host --> a storage writes them
    load    mark ... buffer --> a storage fills it --> begin_in --> on its way --> in the pool

On a CPU a block's bytes are used where they lie in the pool, and nothing is ever on its way
(`BlocksInPlace`). Another device copies them from and to host memory (staged_blocks.py).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.tiers.storage import Bytes


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Returns whether the device has come there."""

    def synchronize(self) -> object:
        """Waits until it has."""


class HostPages(NamedTuple):
    """Memory of the host for copies of blocks."""

    data: Bytes  # [num_bytes]
    is_reached: bool  # the device copies from it and to it by itself


class Channel(Protocol):
    """Copies blocks for one thread; no other thread uses it."""

    num_at_once: int  # blocks that may be on their way, each way

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        """Begins to copy a block out, after the work of the engine that `after` marks; into `slot`,
        if that is given. What is returned waits for the bytes. They may change after
        `num_at_once` more calls."""

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        """Returns where a storage puts the bytes that are to go to a block; `slot`, if given."""

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        """Begins to copy what is in `buffer` now to the block, after the work of the engine that
        `after` marks. The bytes stay as they are, and the block is written, until the event."""


class DeviceBlocks(Protocol):
    """The blocks of a pool on its device."""

    def mark(self) -> Event:
        """Marks the work that the engine has given the device by now. For the engine's thread."""

    def open_channel(self) -> Channel:
        """Returns a channel for a further thread."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Returns zeroed memory, which goes with its last user. Raises ConfigError."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""


DONE: Event = _Done()


class BlocksInPlace(DeviceBlocks, Channel):
    """The pool of a CPU: storages write from it and read into it."""

    num_at_once = 64

    def __init__(self, rows: Bytes) -> None:
        """`rows` are the pool's bytes, [num_blocks, block_bytes]."""
        self._rows = rows

    def mark(self) -> Event:
        return DONE

    def open_channel(self) -> Channel:
        return self

    def host_pages(self, num_bytes: int) -> HostPages:
        return HostPages(np.frombuffer(own_pages(num_bytes), np.uint8), is_reached=False)

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        return lambda: self._rows[block_id]

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        row: Bytes = self._rows[block_id]
        return row

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        return DONE
