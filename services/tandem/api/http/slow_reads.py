"""Bounds how often connections whose headers come in small pieces wake the router.

    read --little came, and the header is incomplete--> waiting --its address's turn--> read

A waiting connection is not read: what it sends stays in the kernel. Each sweep lets some of every
address be read again, so that the work for an address is bounded however many connections it has
and whatever they send, and no address waits for another. Knows no HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable

LITTLE_BYTES = 512  # a network packet that is not the last of a header has more
FREE_READS = 3  # of little, for each header
_SWEEP_S = 0.05
_READS_OF_ADDRESS = 8  # in a sweep


class SlowReads:
    """The waiting connections of one server."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, address: str, read: Callable[[], None]) -> None:
        """Calls `read` when it is the connection's turn."""
        self._waiting.setdefault(address, deque()).append(read)
        if self._timer is None:
            self._start()

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        for address, waiting in list(self._waiting.items()):
            for _ in range(min(_READS_OF_ADDRESS, len(waiting))):
                waiting.popleft()()
            if not waiting:
                del self._waiting[address]
        if self._waiting:
            self._start()
