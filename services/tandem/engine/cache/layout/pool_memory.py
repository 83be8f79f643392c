"""Memory for a KV pool on a CPU: this process's own, or mapped by another one, too.

Shared memory is a memfd: it has no name in the file system, and it is gone with the last process
that maps it. Whoever made it passes its number to a child (pass_fds); both map it.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading

from tandem.errors import ConfigError

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_POPULATED_AT_ONCE = 4 << 20  # the system's lock on the address space is held as long
_POPULATING_NICE = 10


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


def populate(address: int, num_bytes: int) -> threading.Thread:
    """Takes a pool's pages from the system ahead of the steps that first write them.

    Such a step waits for each page to be found and zeroed: 5 to 7% of a prefill where it was
    measured (docs/kernels.md). The thread gives way to the engine's; it ends when all pages are
    there, or where the system does not know how to.
    """

    def work() -> None:
        with contextlib.suppress(OSError):  # of a thread: Linux counts niceness by thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POPULATING_NICE)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for first in range(0, num_bytes, _POPULATED_AT_ONCE):
            size = min(_POPULATED_AT_ONCE, num_bytes - first)
            start = ctypes.c_void_p(address + first)
            if madvise(start, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                if (error := ctypes.get_errno()) != errno.EINVAL:
                    log.warning(
                        "%d bytes of the KV pool are not taken ahead: %s",
                        num_bytes - first,
                        os.strerror(error),
                    )
                return

    thread = threading.Thread(target=work, name="populate-pool", daemon=True)
    thread.start()
    return thread


def _in_huge_pages(pages: mmap.mmap) -> mmap.mmap:
    """Requests huge pages, because a layer's share of a block is spread over the whole pool.

    Only a hint: a kernel that was built without huge pages answers EINVAL.
    """
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _no_memory(num_bytes: int, error: OSError) -> ConfigError:
    return ConfigError(f"no memory for a KV pool of {num_bytes:,} bytes: {error}")
