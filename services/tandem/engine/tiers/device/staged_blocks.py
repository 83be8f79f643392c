"""The blocks of a pool whose bytes the host cannot touch: copies, by way of memory of the host.

    pool block --stream--> slot of a tier in host memory, or a buffer --> disk, store
    pool block <--stream-- slot of a tier in host memory, or a buffer <-- disk, store

Each channel has a stream and a ring of buffers of its own. A buffer is used again only when the
copy that used it last is done.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tandem.engine.tiers.device.blocks import DONE, Channel, DeviceBlocks, Event, HostPages
from tandem.engine.tiers.storage import Bytes

RING_BYTES = 64 << 20  # of a channel
RING_MIN = 2  # buffers
RING_MAX = 16  # buffers


class Stream(Protocol):
    """Copies one after the other, beside the engine's work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Queues a copy that begins after `after`; returns its end. One of the tensors is on the
        device."""


class Device(Protocol):
    """A device that copies by itself."""

    def mark(self) -> Event:
        """Marks the work that the calling thread has given the device by now."""

    def open_stream(self) -> Stream:
        """Returns a further stream."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Returns zeroed memory of the host, which the device reaches if the system allows it.
        Raises ConfigError."""


class StagedBlocks(DeviceBlocks):
    def __init__(self, rows: torch.Tensor, device: Device) -> None:
        """`rows` are the pool's bytes on the device, uint8 [num_blocks, block_bytes]."""
        self._rows = rows
        self._device = device

    def mark(self) -> Event:
        return self._device.mark()

    def open_channel(self) -> Channel:
        return StagedChannel(self._rows, self._device)

    def host_pages(self, num_bytes: int) -> HostPages:
        return self._device.host_pages(num_bytes)


class StagedChannel(Channel):
    def __init__(self, rows: torch.Tensor, device: Device) -> None:
        self._rows = rows
        self._stream = device.open_stream()
        block_bytes = rows.shape[1]
        self.num_at_once = max(RING_MIN, min(RING_MAX, RING_BYTES // block_bytes))
        pages = device.host_pages(self.num_at_once * block_bytes)
        self._ring = pages.data.reshape(self.num_at_once, block_bytes)
        self._used: list[Event] = [DONE] * self.num_at_once  # ends of the copies of each buffer
        self._next = 0

    def begin_out(self, block_id: int, after: Event, slot: Bytes | None) -> Callable[[], Bytes]:
        data = self.buffer(block_id, slot)
        done = self._copy(torch.from_numpy(data), self._rows[block_id], data, after)

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
        return self._copy(self._rows[block_id], torch.from_numpy(data), data, after)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, host: Bytes, after: Event) -> Event:
        done = self._stream.copy(target, source, after)
        if host.ctypes.data == self._ring[self._next].ctypes.data:
            self._used[self._next] = done
        return done
