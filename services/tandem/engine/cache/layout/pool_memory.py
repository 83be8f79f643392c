"""Memory for a KV pool on a CPU: private to this process, or shared with another one.

Shared memory is a memfd, a file in memory without a name. The system frees it when the last process
that maps it ends. The process that creates the memfd passes the file descriptor to a child process
(pass_fds), and both map it.
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

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no constant for it
# Bytes that one call allocates. A call locks the process's address space, so it must be short.
_POPULATED_AT_ONCE = 4 << 20
_POPULATING_NICE = 10


def create_shared() -> int | None:
    """Returns the descriptor of a new, empty memfd; None if the system has no memfd."""
    try:
        return os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None


def own_pages(num_bytes: int) -> mmap.mmap:
    """Maps private, zeroed, page-aligned memory. The system allocates a page when it is first
    written. Raises ConfigError."""
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(num_bytes, error) from error
    return _in_huge_pages(pages)


def size_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Sets the size of a new memfd and maps it. The memory is zeroed. Closes `fd`. Raises
    ConfigError."""
    try:
        os.ftruncate(fd, num_bytes)
        return map_shared(fd, num_bytes)
    except OSError as error:
        raise _no_memory(num_bytes, error) from error


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps a memfd whose size was set by `size_shared`. Closes `fd`. Raises OSError."""
    try:
        return _in_huge_pages(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED))
    finally:
        os.close(fd)


def populate(address: int, num_bytes: int) -> threading.Thread:
    """Starts a thread that allocates a pool's pages in advance.

    Without the thread, the first step that writes a page waits until the system has allocated and
    zeroed the page. In a measurement this took 5 to 7% of the time of a prefill (docs/kernels.md).
    The thread has a lower priority than the engine's thread. It ends when all pages are allocated,
    or if the system does not support the call.
    """

    def work() -> None:
        with contextlib.suppress(OSError):  # on Linux this lowers the priority of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POPULATING_NICE)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for first in range(0, num_bytes, _POPULATED_AT_ONCE):
            size = min(_POPULATED_AT_ONCE, num_bytes - first)
            start = ctypes.c_void_p(address + first)
            if madvise(start, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                if (error := ctypes.get_errno()) != errno.EINVAL:
                    log.warning(
                        "%d bytes of the KV pool could not be allocated in advance (%s); the first "
                        "steps that write to these bytes are slower",
                        num_bytes - first,
                        os.strerror(error),
                    )
                return

    thread = threading.Thread(target=work, name="populate-pool", daemon=True)
    thread.start()
    return thread


def _in_huge_pages(pages: mmap.mmap) -> mmap.mmap:
    """Requests huge pages, because each layer of a model reads small spans all over the pool.

    This is only a hint: a Linux kernel without huge pages returns EINVAL.
    """
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _no_memory(num_bytes: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"a KV pool of {num_bytes:,} bytes cannot be allocated: {error}; lower --kv-memory or "
        "--num-blocks"
    )
