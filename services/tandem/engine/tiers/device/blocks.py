"""Defines how the threads of tiers copy blocks out of a KV pool and into it.

    write to a tier    `begin_out` copies the block to host memory --> a storage writes the bytes
    load from a tier   a storage fills the `buffer` --> `begin_in` copies the bytes to the block

Each copy starts after an event of the engine (`mark`), for example after the step that fills the
block. On a CPU there are no copies: storages use a block's bytes directly in the pool
(`BlocksInPlace`). Other devices use staged_blocks.py.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.tiers.storage import Bytes


class Event(Protocol):
    """A point in the order of work that was submitted to a device, such as a CUDA event."""

    def query(self) -> bool:
        """Returns whether the device has reached this point."""

    def synchronize(self) -> object:
        """Waits until the device reaches this point."""


class HostPages(NamedTuple):
    """Host memory for copies of blocks."""

    data: Bytes  # [num_bytes]
    is_device_accessible: bool  # True: the device can copy to and from this memory asynchronously


class Channel(Protocol):
    """Copies blocks for one thread. No other thread may use the same channel."""

    num_at_once: int  # maximum number of copies in flight, in each direction

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        """Starts to copy a block to host memory, once the device has reached the event `after`. The
        copy goes to `slot`, if given.

        The returned function waits for the end of the copy and returns the bytes. The bytes may be
        overwritten after `num_at_once` more calls of `begin_out`.
        """

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        """Returns the memory into which a storage reads a block, uint8 [block_bytes]: `slot` if it
        is given, or else memory that the channel provides."""

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        """Starts to copy `data` to a block, once the device has reached the event `after`. `data`
        is the result of `buffer`, which a storage has filled.

        The returned event marks the end of the copy. `data` must not change before it.
        """


class DeviceBlocks(Protocol):
    """The blocks of a pool on its device."""

    def mark(self) -> Event:
        """Returns an event that follows all work that the engine has submitted to the device so
        far. May only be called in the engine's thread."""

    def open_channel(self) -> Channel:
        """Returns a new channel, for use by one thread."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Returns zeroed host memory, which is freed when nothing references it any more. Raises
        ConfigError."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns immediately."""


DONE: Event = _Done()


class BlocksInPlace(DeviceBlocks, Channel):
    """The pool of a CPU. Storages read and write its blocks directly, without copies."""

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
