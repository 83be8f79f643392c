"""Limits the bytes of unparsed request bodies, in total and for each client address.

  chunk --take--> charged --parsed, refused, late, or client disconnected--> released
                    `--silent, or of the address with the most bytes--> revoked, which releases

Bodies never wait. A body that does not fit is refused, unless others can be revoked for it:

- of the same address, if that is at its limit: bodies without data for a second;
- of the address with the most bytes, if the process is at its limit: the one without data longest.

So unfinished bodies of one address can block neither other addresses nor complete bodies of the
same address. This module is independent of HTTP and gRPC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.errors import BodiesFull, TooManyRequests

_SILENT_S = 1.0  # A body without data for this long can be revoked for another one of its address.
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Held:
    """The charged bodies of one address, in the order of their last data, oldest first."""

    num_bytes: int = 0
    bodies: dict[Body, None] = field(default_factory=dict)

    def longest_silent(self, now: float) -> Body | None:
        for body in self.bodies:
            return body if now - body.heard_at >= _SILENT_S else None
        return None


class BodyBudget:
    """The budget that the listeners of one process share."""

    def __init__(self, bytes_max: int = 256 << 20, bytes_of_address_max: int = 0) -> None:
        """Without `bytes_of_address_max`, an address may have half of all bytes."""
        self.num_bytes = 0
        self._bytes_max = bytes_max
        self._of_address_max = bytes_of_address_max or bytes_max // 2
        self._held: dict[str, _Held] = {}

    @contextlib.contextmanager
    def body(
        self, address: str, revoke: Callable[[], None], *, free_bytes: int = 0
    ) -> Iterator[Body]:
        """Yields the account of one body and releases it at the end. `revoke` is called when the
        body is revoked; it should wake the reader, which then calls `check`. The first `free_bytes`
        are not charged."""
        body = Body(self, address, revoke, free_bytes)
        try:
            yield body
        finally:
            self.release(body)

    def charge(self, body: Body, num_bytes: int) -> None:
        """Charges bytes to a body. Raises TooManyRequests if its address is at its limit, and
        BodiesFull if the process is."""
        now = time.monotonic()
        held = self._held.get(body.address) or _Held()
        while held.num_bytes + num_bytes > self._of_address_max:
            silent = held.longest_silent(now)
            if silent is None or silent is body:
                raise TooManyRequests(
                    f"request bodies of your address have {held.num_bytes} bytes that are not "
                    f"parsed yet; at most {self._of_address_max} are taken",
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
        """Releases what the body was charged. Repeated calls have no effect."""
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
    """The account of one body."""

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
        """Charges bytes that have arrived. Raises BodiesFull and TooManyRequests."""
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
        """Releases the charged bytes before the account ends."""
        self._budget.release(self)


def _full() -> BodiesFull:
    return BodiesFull(
        "the router has too many bytes of request bodies that are not parsed yet; send the "
        "request again",
        retry_after_s=_RETRY_AFTER_S,
    )
