"""Provides CUDA streams, events and pinned host memory for the copies of tiers.

A copy starts after an event on the engine's stream, and runs on a stream of its own. The host waits
for the end of each copy. So the engine submits a step that reads a loaded block only after the
block's copy is done.
"""

import logging
import weakref

import numpy as np
import torch

from tandem.engine.cache.layout.pool_memory import own_pages
from tandem.engine.tiers.device.blocks import Event, HostPages
from tandem.engine.tiers.device.staged_blocks import Device, Stream
from tandem.engine.tiers.storage import Bytes

log = logging.getLogger(__name__)


class CudaDevice(Device):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def open_stream(self) -> Stream:
        return CudaStream(self._device)

    def host_pages(self, num_bytes: int) -> HostPages:
        """Allocates host memory and pins it.

        If CUDA cannot pin the memory, copies to and from it block in the driver. A tier in host
        memory then copies its blocks through the buffers of a channel.
        """
        data = np.frombuffer(own_pages(num_bytes), np.uint8)
        return HostPages(data, is_device_accessible=self.pin(data))

    def pin(self, data: Bytes) -> bool:
        """Pins (page-locks) memory by registering it with CUDA, for as long as `data` lives. If
        CUDA refuses, logs a warning and returns False."""
        address = data.ctypes.data
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(address, data.nbytes, 0)
        if error != cudart.cudaError.success:
            log.warning(
                "CUDA cannot pin %s bytes of host memory for KV tiers (%s), so copies are slower; "
                "raise the process's limit of locked memory (ulimit -l), or lower --kv-host-memory",
                f"{data.nbytes:,}",
                cudart.cudaGetErrorString(error),
            )
            _forget_error(self._device)
            return False
        ended = weakref.finalize(data, cudart.cudaHostUnregister, address)
        ended.atexit = False  # the process frees everything at exit
        return True


class CudaStream(Stream):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)  # type: ignore[arg-type]
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done


def _forget_error(device: torch.device) -> None:
    """Clears an error that was handled already. Otherwise CUDA would report it again at the next
    kernel launch."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:
        log.debug("ignored a CUDA error that has already been handled: %s", error)
