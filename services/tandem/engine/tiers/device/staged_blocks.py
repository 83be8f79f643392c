"""Copies the blocks of a pool that the host cannot access directly, such as a pool on a GPU, or the
pools of several ranks (executor/ranks/tier_copies.py).

    to host memory            block in the pool --> slot of the tier
    to a disk or store        block in the pool --> buffer in host memory --> disk or store
    from a tier to the pool   the same steps in the opposite direction

Each channel has its own stream and its own ring of buffers. A buffer is reused only when the last
copy that used it is done.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tandem.engine.tiers.device.blocks import DONE, Channel, DeviceBlocks, Event, HostPages
from tandem.engine.tiers.storage import Bytes

# Limit on the total bytes of the buffers in one channel's ring. A ring has at least RING_MIN
# buffers, even if these exceed the limit.
RING_BYTES = 64 << 20
RING_MIN = 2  # smallest number of buffers in a ring
RING_MAX = 16  # largest number of buffers in a ring


class Stream(Protocol):
    """Runs copies one after the other, at the same time as the engine's work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Queues a copy that starts once the event `after` is reached. Returns an event that marks
        the end of the copy. One of the tensors is on the device."""


class Device(Protocol):
    """A device that copies asynchronously."""

    def mark(self) -> Event:
        """Returns an event that follows all work that the calling thread has submitted to the
        device."""

    def open_stream(self) -> Stream:
        """Returns a new stream."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Returns zeroed host memory, pinned if the system allows it. Raises ConfigError."""


class Copier(Protocol):
    """Copies blocks between a pool and host memory, at the same time as the engine's work. A copy
    starts once the event `after` is reached. The returned event marks its end."""

    def copy_out(self, block_id: int, host: Bytes, after: Event) -> Event:
        """Starts to copy a block to `host` [block_bytes]."""

    def copy_in(self, block_id: int, host: Bytes, after: Event) -> Event:
        """Starts to copy `host` to a block."""


class StreamCopier(Copier):
    """Copies the blocks of a pool on a stream of its device."""

    def __init__(self, rows: torch.Tensor, stream: Stream) -> None:
        """`rows` are the pool's bytes on the device, uint8 [num_blocks, block_bytes]."""
        self._rows = rows
        self._stream = stream

    def copy_out(self, block_id: int, host: Bytes, after: Event) -> Event:
        return self._stream.copy(torch.from_numpy(host), self._rows[block_id], after)

    def copy_in(self, block_id: int, host: Bytes, after: Event) -> Event:
        return self._stream.copy(self._rows[block_id], torch.from_numpy(host), after)


class StagedBlocks(DeviceBlocks):
    def __init__(self, rows: torch.Tensor, device: Device) -> None:
        """`rows` are the pool's bytes on the device, uint8 [num_blocks, block_bytes]."""
        self._rows = rows
        self._device = device

    def mark(self) -> Event:
        return self._device.mark()

    def open_channel(self) -> Channel:
        copier = StreamCopier(self._rows, self._device.open_stream())
        return StagedChannel(copier, self._rows.shape[1], self._device.host_pages)

    def host_pages(self, num_bytes: int) -> HostPages:
        return self._device.host_pages(num_bytes)


def ring_slots(block_bytes: int) -> int:
    """Returns the number of buffers, of one block each, in a channel's ring."""
    return max(RING_MIN, min(RING_MAX, RING_BYTES // block_bytes))


class StagedChannel(Channel):
    def __init__(
        self, copier: Copier, block_bytes: int, host_pages: Callable[[int], HostPages]
    ) -> None:
        """`host_pages` allocates the ring."""
        self._copier = copier
        self.num_at_once = ring_slots(block_bytes)
        pages = host_pages(self.num_at_once * block_bytes)
        self._ring = pages.data.reshape(self.num_at_once, block_bytes)
        # For each buffer: the event at which the latest copy that used this buffer ends.
        self._used: list[Event] = [DONE] * self.num_at_once
        self._next = 0

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        data = self.buffer(block_id, slot)
        done = self._note(self._copier.copy_out(block_id, data, after), data)

        def wait() -> Bytes:
            done.synchronize()
            return data

        return wait

    def buffer(self, block_id: int, slot: Bytes | None) -> Bytes:
        if slot is not None:
            return slot
        self._next = (self._next + 1) % self.num_at_once
        self._used[self._next].synchronize()
        data: Bytes = self._ring[self._next]
        return data

    def begin_in(self, block_id: int, data: Bytes, after: Event) -> Event:
        return self._note(self._copier.copy_in(block_id, data, after), data)

    def _note(self, done: Event, host: Bytes) -> Event:
        """Keeps the end of a copy if the copy uses the current buffer of the ring."""
        if host.ctypes.data == self._ring[self._next].ctypes.data:
            self._used[self._next] = done
        return done
