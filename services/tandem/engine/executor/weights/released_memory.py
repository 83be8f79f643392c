"""Returns memory to the system while a process loads weights.

Two kinds of memory are no longer needed after a tensor is converted: the pages of the mapped file
that held the tensor, and freed memory.

The file's pages count as the process's memory after their first use. A dropped page is read from
the file again if it is needed. glibc keeps freed blocks of up to 32 MiB for later allocations, and
a process that loads weights frees as much memory of converted tensors as it keeps.
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
    """The address ranges at which some files are mapped when the object is created."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        if not _MAPS.is_file():  # this is not Linux
            return
        names = {str(file.resolve()) for file in files}
        for line in _MAPS.read_text().splitlines():
            span, _, _, _, _, *name = line.split(maxsplit=5)
            if name and name[0] in names:
                first, end = (int(bound, 16) for bound in span.split("-"))
                self._spans.append((first, end))
        self._madvise = ctypes.CDLL(None).madvise

    def drop(self, tensor: torch.Tensor) -> None:
        """Drops the pages that lie completely within a tensor. Does nothing if the tensor does not
        lie in one of the files."""
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
    """Returns the pages of freed blocks to the system."""
    if _trim is not None:
        _trim(0)
