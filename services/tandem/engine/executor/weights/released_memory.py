"""Returns memory to the system while a process loads weights. After a tensor is converted, two
kinds of memory are not needed any more:

- The pages of the mapped file from which the tensor was read. Such a page counts as memory of the
  process until it is dropped. If a dropped page is accessed again, the system reads the page from
  the file.
- Memory that the process has freed. glibc keeps freed pieces of up to 32 MiB for later
  allocations. During a load, the kept pieces can need as much memory as the weights.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has this function


class FilePages:
    """The address ranges at which files are mapped into this process when the object is created."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        if not _MAPS.is_file():  # not on Linux
            return
        names = {str(file.resolve()) for file in files}
        for line in _MAPS.read_text().splitlines():
            span, _, _, _, _, *name = line.split(maxsplit=5)
            if name and name[0] in names:
                first, end = (int(bound, 16) for bound in span.split("-"))
                self._spans.append((first, end))
        self._madvise = ctypes.CDLL(None).madvise

    def drop(self, tensor: torch.Tensor) -> None:
        """Drops the pages of a tensor from memory. A page that also has other data is not dropped.
        Does nothing if the tensor is not in one of the mapped files."""
        if tensor.device.type != "cpu":
            return
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if any(first <= begin and end <= last for first, last in self._spans):
            begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            num_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
            if num_bytes > 0:
                self._madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_DONTNEED)


def release_freed_memory() -> None:
    """Makes glibc return to the system the freed memory that it keeps for later allocations."""
    if _trim is not None:
        _trim(0)
