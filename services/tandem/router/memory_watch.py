"""Ends a process before its memory use harms others on its machine.

Every 0.1 seconds, a thread compares the growth of the resident memory with two limits:
    Growth                      Action
    above `growth_bytes_max`    `give_way` is called, which drains and then ends the process
    above the hard limit        the process ends at once
The hard limit is 1.5 times `growth_bytes_max`, but at least 256 MiB more than `growth_bytes_max`.

The watch is needed because gRPC's core never frees the header tables (HPACK) of some connections.
Anyone who can reach the gRPC port can make gRPC build such tables, without an API key: 0.25 to
0.9 MB for each 15 KB sent.

The memory may grow faster than the thread runs. So the watch also sets the kernel's limit
RLIMIT_DATA, somewhat above the hard limit. Allocations beyond RLIMIT_DATA fail. Child processes
inherit RLIMIT_DATA.
"""

import logging
import os
import resource
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

# Also while the memory does not grow: within half a second, clients can fill more than what is
# between the two limits, and then the process ends without a drain.
_INTERVAL_S = 0.1
# The hard limit is at least this many bytes above `growth_bytes_max`, because the memory still
# grows during the drain: clients that fill the memory are not disconnected at once.
_ABOVE_BYTES_MIN = 256 << 20
# RLIMIT_DATA is this many bytes above the hard limit, because it also counts thread stacks.
_BEHIND_BYTES = 1 << 30
_LOADED_BYTES_MAX = 256 << 20  # `rebase` raises the baseline by at most this; tokenizers need less
_PAGE_BYTES = resource.getpagesize()
_STATM = "/proc/self/statm"


class MemoryWatch:
    """Watches how much this process has grown since `start` or the last `rebase`."""

    def __init__(self, growth_bytes_max: int, give_way: Callable[[str], object]) -> None:
        """`give_way` is called once, in the watch's thread. Its argument is the reason as text."""
        self._growth_bytes_max = growth_bytes_max
        self._hard_bytes = growth_bytes_max + max(growth_bytes_max // 2, _ABOVE_BYTES_MIN)
        self._give_way = give_way
        self._base_bytes = 0

    def start(self) -> None:
        self._base_bytes = resident_bytes()
        self._bound_data()
        threading.Thread(target=self._run, name="memory-watch", daemon=True).start()

    def rebase(self) -> None:
        """Sets the baseline to the current memory, so a loaded tokenizer does not count as growth.

        The baseline rises by at most `_LOADED_BYTES_MAX`, because clients may also have filled
        memory while the tokenizer was loaded.
        """
        self._base_bytes = min(resident_bytes(), self._base_bytes + _LOADED_BYTES_MAX)
        self._bound_data()

    def _bound_data(self) -> None:
        """Sets RLIMIT_DATA: the data size at the baseline, plus the hard limit and a margin."""
        data_bytes = _statm()[5] * _PAGE_BYTES  # the memory that RLIMIT_DATA limits
        grown_bytes = resident_bytes() - self._base_bytes
        bound = data_bytes - grown_bytes + self._hard_bytes + _BEHIND_BYTES
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        if most == resource.RLIM_INFINITY or bound < most:
            resource.setrlimit(resource.RLIMIT_DATA, (bound, most))

    def _run(self) -> None:
        gives_way = False
        # The file stays open, because opening it takes longer than reading it.
        file = os.open(_STATM, os.O_RDONLY)
        while True:
            time.sleep(_INTERVAL_S)
            growth = _numbers_of(file)[1] * _PAGE_BYTES - self._base_bytes
            if growth > self._hard_bytes:
                log.error(
                    "this process ends now: its memory grew by %d MiB, which is over the "
                    "hard limit of %d MiB that --grpc-memory sets",
                    growth >> 20,
                    self._hard_bytes >> 20,
                )
                logging.shutdown()
                os._exit(1)
            if growth > self._growth_bytes_max and not gives_way:
                gives_way = True
                self._give_way(
                    f"the memory of this process grew by {growth >> 20} MiB, and --grpc-memory "
                    f"allows {self._growth_bytes_max >> 20} MiB: the process drains and ends, so "
                    "that it is started again"
                )


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return _statm()[1] * _PAGE_BYTES


def _statm() -> list[int]:
    file = os.open(_STATM, os.O_RDONLY)  # several times as fast as a text file
    try:
        return _numbers_of(file)
    finally:
        os.close(file)


def _numbers_of(file: int) -> list[int]:
    return [int(number) for number in os.pread(file, 256, 0).split()]
