"""Bounds on the connections of a small HTTP server that has a thread for each of them.

    accepted --its call is answered--> closed
       |-- too late: closed
       `-- no place, and an older one exists: the oldest of its address gives way

For ports with a few short calls: those of metrics and probes, and the one that machines join at.
"""

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from socket import SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from typing import Any

_YOUNG_S = 0.5  # a connection that is younger does not give way: its call may be on its way


@dataclass(eq=False, slots=True)
class _Open:
    """A connection, by a copy of its file: TLS takes over the original."""

    address: str
    sock: socket
    opened_at: float


class BoundedThreads(ThreadingMixIn):
    """A server's connections, each with a thread, within bounds on their number and duration."""

    daemon_threads = True
    request_queue_size = 128
    connections_max = 64
    of_address_max = 32
    deadline_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[_Open, None] = {}  # the oldest first
        self._num_of: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        found = self._enter(request, str(client_address[0]))
        if found is None:
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        threading.Thread(
            target=self._run, args=(found, request, client_address), daemon=True
        ).start()

    def service_actions(self) -> None:
        """Closes what is late; the server's loop calls this at least twice a second."""
        until = time.monotonic() - self.deadline_s
        with self._lock:
            for late in [one for one in self._open if one.opened_at <= until]:
                self._end(late)

    def _run(self, found: _Open, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._end(found)
            found.sock.close()

    def _enter(self, request: socket, address: str) -> _Open | None:
        """Returns the place of a new connection; None if there is none."""
        now = time.monotonic()
        with self._lock:
            if self._num_of[address] >= self.of_address_max:
                crowded = address
            elif len(self._open) >= self.connections_max:
                crowded = self._num_of.most_common(1)[0][0]
            else:
                crowded = ""
            if crowded:
                oldest = next(one for one in self._open if one.address == crowded)
                if now - oldest.opened_at < _YOUNG_S:
                    return None
                self._end(oldest)
            found = _Open(address, request.dup(), now)
            self._open[found] = None
            self._num_of[address] += 1
        return found

    def _end(self, one: _Open) -> None:
        """Ends a connection, whose thread then closes it; a second time nothing happens."""
        if one not in self._open:
            return
        del self._open[one]
        self._num_of[one.address] -= 1
        if not self._num_of[one.address]:
            del self._num_of[one.address]
        with suppress(OSError):
            one.sock.shutdown(SHUT_RDWR)
