"""Limits the bytes of unparsed request bodies, in total and for each client address.

Each chunk of a body counts from the chunk's arrival (`take`) until the body is released. A body is
released when it has been parsed or refused, when it is late, or when the client has disconnected.

If a new chunk would exceed a limit, the budget revokes other bodies: their requests fail, and their
bytes are released. Below, the client address is the address that sent the new chunk:

    limit that would be exceeded    address whose bodies are revoked
    of the client address           the client address
    of the process                  the address with the most bytes

Of this address, the body that has received no data for the longest time is revoked first. A body of
the client address is revoked only if it has received no data for at least _SILENT_S. If no body may
be revoked, the body with the new chunk is refused.

So an address with many unfinished bodies can block neither other addresses nor its own complete
bodies. This module does not depend on HTTP or gRPC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.errors import BodiesFull, TooManyRequests

# A body that has received no data for this many seconds can be revoked in favour of another body of
# the same address.
_SILENT_S = 1.0
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Held:
    """The bodies of one address that count in the budget. The first item of `bodies` has received
    no data for the longest time."""

    num_bytes: int = 0
    bodies: dict[Body, None] = field(default_factory=dict)

    def longest_silent(self, now: float) -> Body | None:
        for body in self.bodies:
            return body if now - body.heard_at >= _SILENT_S else None
        return None


class BodyBudget:
    """The budget for unparsed bodies, which all listeners of one process share."""

    def __init__(self, bytes_max: int = 256 << 20, bytes_of_address_max: int = 0) -> None:
        """`bytes_max` is the limit of the process, and `bytes_of_address_max` the limit of each
        client address. If the latter is 0, it is half of `bytes_max`."""
        self.num_bytes = 0
        self._bytes_max = bytes_max
        self._of_address_max = bytes_of_address_max or bytes_max // 2
        self._held: dict[str, _Held] = {}

    @contextlib.contextmanager
    def body(
        self, address: str, revoke: Callable[[], None], *, free_bytes: int = 0
    ) -> Iterator[Body]:
        """Yields the object that counts the bytes of one body. Releases the bytes at the end of the
        context. The first `free_bytes` of the body do not count.

        When the body is revoked, the budget calls `revoke`. This function must wake the task that
        reads the body. The task must then call `check`, which raises BodiesFull."""
        body = Body(self, address, revoke, free_bytes)
        try:
            yield body
        finally:
            self.release(body)

    def charge(self, body: Body, num_bytes: int) -> None:
        """Counts `num_bytes` new bytes of a body. Revokes other bodies if a limit would be
        exceeded.

        If no other body may be revoked, raises TooManyRequests for the limit of the client address,
        and BodiesFull for the limit of the process."""
        now = time.monotonic()
        held = self._held.get(body.address) or _Held()
        while held.num_bytes + num_bytes > self._of_address_max:
            silent = held.longest_silent(now)
            if silent is None or silent is body:
                raise TooManyRequests(
                    f"the router holds {held.num_bytes} bytes of unparsed request bodies from your "
                    f"address and accepts at most {self._of_address_max}; try again later",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._revoke(silent)
        while self.num_bytes + num_bytes > self._bytes_max:
            most = max(self._held.values(), key=lambda h: h.num_bytes)
            other = next(iter(most.bodies)) if most is not held else held.longest_silent(now)
            if other is None or other is body:
                raise _full()
            self._revoke(other)
        held.bodies.pop(body, None)
        held.bodies[body] = None
        held.num_bytes += num_bytes
        body.charged += num_bytes
        body.heard_at = now
        self.num_bytes += num_bytes
        self._held[body.address] = held

    def release(self, body: Body) -> None:
        """Releases all counted bytes of the body. Repeated calls have no effect."""
        held = self._held.get(body.address)
        if held is None or body not in held.bodies:
            return
        del held.bodies[body]
        held.num_bytes -= body.charged
        self.num_bytes -= body.charged
        body.charged = 0
        if not held.bodies:
            del self._held[body.address]

    def _revoke(self, body: Body) -> None:
        self.release(body)
        body.is_revoked = True
        body.revoke()


class Body:
    """Counts the bytes of one body in the budget."""

    def __init__(
        self, budget: BodyBudget, address: str, revoke: Callable[[], None], free_bytes: int
    ) -> None:
        self.address = address
        self.revoke = revoke
        self.charged = 0
        self.heard_at = 0.0
        self.is_revoked = False
        self._budget = budget
        self._free_left = free_bytes

    def take(self, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises BodiesFull or TooManyRequests if the body is
        refused."""
        self.check()
        free = min(self._free_left, num_bytes)
        self._free_left -= free
        if num_bytes > free:
            self._budget.charge(self, num_bytes - free)

    def check(self) -> None:
        """Raises BodiesFull if the body was revoked."""
        if self.is_revoked:
            raise _full()

    def release(self) -> None:
        """Releases the counted bytes now, before the context of `BodyBudget.body` ends."""
        self._budget.release(self)


def _full() -> BodiesFull:
    return BodiesFull(
        "the router has too many bytes of request bodies that are not parsed yet; send the "
        "request again",
        retry_after_s=_RETRY_AFTER_S,
    )
