"""The protocol by which the threads of tiers access the blocks of a pool.

    write   mark ... begin_out --> copy in flight --> bytes on the host --> a storage writes them
    load    mark ... buffer --> a storage fills it --> begin_in --> copy in flight --> in the pool

On a CPU, storages use a block's bytes directly in the pool, without copies (`BlocksInPlace`). Other
devices copy them to and from host memory (staged_blocks.py).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.tiers.storage import Bytes


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Returns whether the device has reached this point."""

    def synchronize(self) -> object:
        """Waits until the device reaches this point."""


class HostPages(NamedTuple):
    """Host memory for copies of blocks."""

    data: Bytes  # [num_bytes]
    is_device_accessible: bool  # the device can copy to and from it asynchronously


class Channel(Protocol):
    """Copies blocks for one thread; no other thread uses it."""

    num_at_once: int  # maximum number of copies in flight, in each direction

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        """Starts to copy a block to the host, after the engine's work that `after` marks. The copy
        goes to `slot`, if given.

        The returned function waits for the end of the copy and returns the bytes. They may be
        overwritten after `num_at_once` more calls of `begin_out`.
        """

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        """Returns the memory [block_bytes] that a storage fills for a block: `slot`, if given."""

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        """Starts to copy `data`, the filled result of `buffer`, to the block, after the engine's
        work that `after` marks.

        Until the returned event, the block is being written, so `data` must not change.
        """


class DeviceBlocks(Protocol):
    """The blocks of a pool on its device."""

    def mark(self) -> Event:
        """Returns an event after the work that the engine has submitted to the device. Called in
        the engine's thread only."""

    def open_channel(self) -> Channel:
        """Returns a channel for another thread."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Returns zeroed host memory, which is freed with its last reference. Raises
        ConfigError."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns immediately."""


DONE: Event = _Done()


class BlocksInPlace(DeviceBlocks, Channel):
    """The pool of a CPU: storages write from it and read into it directly."""

    num_at_once = 64

    def __init__(self, rows: Bytes) -> None:
        """`rows` are the pool's bytes, [num_blocks, block_bytes]."""
        self._rows = rows

    def mark(self) -> Event:
        return DONE

    def open_channel(self) -> Channel:
        return self

    def host_pages(self, num_bytes: int) -> HostPages:
        return HostPages(np.frombuffer(own_pages(num_bytes), np.uint8), is_device_accessible=False)

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        return lambda: self._rows[block_id]

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        row: Bytes = self._rows[block_id]
        return row

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        return DONE
