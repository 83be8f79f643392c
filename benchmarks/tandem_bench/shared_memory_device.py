"""A device in shared memory, in place of a GPU, for CUDA IPC on a machine without one.

It has the properties of CUDA that a consumer must cope with:

- The memory of a process is a memfd, which other processes map by its path in /proc. A mapping
  keeps the memory allocated, even if its owner was killed.
- Copies run after the call that queues them has returned, one after the other.
- A copy from memory that was unmapped meanwhile is a fault. CUDA would end the context; this device
  raises an error in `close`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.errors import Incompatible, InternalError
from tandem.transfer.cuda_ipc.agent import BlockCopy


@dataclass
class CopyEvent:
    copies: Sequence[BlockCopy]
    is_done: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.is_done.is_set()


@dataclass
class _Mapping:
    pages: mmap.mmap
    memory: NDArray[np.uint8]


class SharedMemoryDevice:
    """The memory of one process, and a thread that copies from mapped memory into it.

    `delay_s` is the time in seconds that each copy takes at least. The other public fields are
    faults that tests set.
    """

    def __init__(self, fd: int, memory: NDArray[np.uint8], delay_s: float = 0.0) -> None:
        """`memory` is the mapped memfd `fd`."""
        self.delay_s = delay_s
        self.failing: set[str] = set()  # names of methods that raise an error
        self.leaks = False  # True: `close` keeps the mapping
        self.waits = True  # False: `synchronize` returns at once
        self.may_copy = threading.Event()  # cleared: copies are queued and do not run
        self.may_copy.set()
        self._fd = fd
        self._memory = memory
        self._mappings: dict[int, _Mapping] = {}
        self._queue: SimpleQueue[CopyEvent] = SimpleQueue()
        self._events: list[CopyEvent] = []  # of copies that may be under way
        threading.Thread(target=self._copy, name="device", daemon=True).start()

    @property
    def num_mappings(self) -> int:
        return len(self._mappings)

    def export(self, address: int) -> bytes:
        self._check("export", Incompatible)
        offset = address - self._memory.ctypes.data
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return msgspec.msgpack.encode((path, offset, self._memory.nbytes))

    def open(self, metadata: bytes) -> int:
        self._check("open", Incompatible)
        path, offset, num_bytes = msgspec.msgpack.decode(metadata, type=tuple[str, int, int])
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise Incompatible(f"the peer's memory cannot be mapped: {error}") from error
        try:
            pages = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        memory = np.frombuffer(pages, np.uint8)
        address = memory.ctypes.data + offset
        self._mappings[address] = _Mapping(pages, memory)
        return address

    def close(self, address: int) -> None:
        self._check("close", InternalError)
        if self.leaks:
            return
        sources = [copy.source for event in self._under_way() for copy in event.copies]
        if any(self._has(address, source) for source in sources):
            raise RuntimeError("memory is unmapped while a copy from it is under way")
        mapping = self._mappings.pop(address)
        del mapping.memory
        mapping.pages.close()

    def start_copy(self, copies: Sequence[BlockCopy]) -> CopyEvent:
        self._check("start_copy", InternalError)
        event = CopyEvent(copies)
        self._events = [*self._under_way(), event]
        self._queue.put(event)
        return event

    def synchronize(self) -> None:
        if self.waits:
            for event in self._events:
                event.is_done.wait()

    def _under_way(self) -> list[CopyEvent]:
        return [event for event in self._events if not event.query()]

    def _has(self, address: int, source: int) -> bool:
        first = self._mappings[address].memory.ctypes.data
        return first <= source < first + self._mappings[address].memory.nbytes

    def _check(self, method: str, kind: type[Incompatible | InternalError]) -> None:
        if method in self.failing:
            raise kind(f"the device was told to fail: {method}")

    def _copy(self) -> None:
        while True:
            event = self._queue.get()
            time.sleep(self.delay_s)
            self.may_copy.wait()
            for copy in event.copies:
                pairs = zip(copy.source_ids.tolist(), copy.target_ids.tolist(), strict=True)
                for source, target in pairs:
                    ctypes.memmove(
                        copy.target + target * copy.target_stride,
                        copy.source + source * copy.source_stride,
                        copy.num_bytes,
                    )
            event.is_done.set()
