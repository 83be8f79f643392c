"""Memory for a KV pool on a CPU: this process's own, or mapped by another one, too.

Shared memory is a memfd: it has no name in the file system, and it is gone with the last process
that maps it. Whoever made it passes its number to a child (pass_fds); both map it.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from services.errors import ConfigError


def create_shared() -> int | None:
    """A memfd of no size yet; None where there is no such thing."""
    try:
        return os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None


def own_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed, page-aligned, taken from the system when first written. Raises ConfigError."""
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(num_bytes, error) from error
    return _in_huge_pages(pages)


def size_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Gives a memfd its size, zeroed, and maps it; the number is closed. Raises ConfigError."""
    try:
        os.ftruncate(fd, num_bytes)
        return map_shared(fd, num_bytes)
    except OSError as error:
        raise _no_memory(num_bytes, error) from error


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps a memfd that has its size; the number is closed. Raises OSError."""
    try:
        return _in_huge_pages(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED))
    finally:
        os.close(fd)


def _in_huge_pages(pages: mmap.mmap) -> mmap.mmap:
    """Because a layer's share of a block is spread over the whole pool.

    Only a hint: a kernel that was built without huge pages answers EINVAL.
    """
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _no_memory(num_bytes: int, error: OSError) -> ConfigError:
    return ConfigError(f"no memory for a KV pool of {num_bytes:,} bytes: {error}")
