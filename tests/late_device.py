"""A device in host memory that executes copies as late as a real device could.

A copy is executed only when it, or a later copy of its stream, is waited for; `query` never reports
it as done before. So a block used before its load has completed has wrong bytes, and a block reused
before its copy was executed corrupts the copy. The engine's own work is queued in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.device.blocks import DeviceBlocks, Event, HostPages
from tandem.engine.tiers.device.staged_blocks import Device, StagedBlocks, Stream


class LateStream(Stream):
    """Executes work in the order in which it was queued."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], object]] = []
        self._num_done = 0
        self._lock = threading.RLock()  # a thread's copies may also be awaited by the engine

    def queue(self, work: Callable[[], object]) -> None:
        self._queued.append(work)

    def mark(self) -> LateEvent:
        return LateEvent(self, len(self._queued))

    def run(self, num_works: int) -> None:
        """Executes the first `num_works` queued items, unless already done."""
        with self._lock:
            while self._num_done < num_works:
                self._queued[self._num_done]()
                self._num_done += 1

    def is_done(self, num_works: int) -> bool:
        return self._num_done >= num_works

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        def work() -> None:
            after.synchronize()
            target.copy_(source)

        self.queue(work)
        return self.mark()


class LateEvent:
    def __init__(self, stream: LateStream, num_works: int) -> None:
        self._stream = stream
        self._num_works = num_works

    def query(self) -> bool:
        return self._stream.is_done(self._num_works)

    def synchronize(self) -> None:
        self._stream.run(self._num_works)


class LateDevice(Device):
    def __init__(self, *, is_pinned: bool = True) -> None:
        """With `is_pinned` the device accesses host memory directly."""
        self.work = LateStream()  # the stream of the engine
        self.is_pinned = is_pinned

    def mark(self) -> Event:
        return self.work.mark()

    def open_stream(self) -> Stream:
        return LateStream()

    def host_pages(self, num_bytes: int) -> HostPages:
        return HostPages(np.frombuffer(own_pages(num_bytes), np.uint8), self.is_pinned)


def stage(monkeypatch: pytest.MonkeyPatch, device: LateDevice) -> None:
    """Makes the tiers of engines created from now on copy blocks like on a device."""

    def device_blocks(rows: torch.Tensor) -> DeviceBlocks:
        return StagedBlocks(rows, device)

    monkeypatch.setattr(make_tiers, "device_blocks", device_blocks)


WAYS = ("in place", "staged", "staged, not pinned")


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Selects how tiers access blocks, one of WAYS."""
    if way != "in place":
        stage(monkeypatch, LateDevice(is_pinned=way == "staged"))
