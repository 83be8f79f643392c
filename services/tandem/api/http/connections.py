"""The places for HTTP connections, and who holds them.

    enter --> slow (a byte is awaited) --> busy --answered--> idle --first byte--> slow or busy

Each address gets a part of the places, except trusted proxies, which have many clients. A new
connection takes the place of one that waits for its client: of the same address if that has its
part, of the address with the most connections if all places are taken. Idle ones go first, then
those that have sent nothing for a second, the longest silent first. An address may exchange so many
of its connections a second: each costs the router more than a refusal. Knows no HTTP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_FULL_INTERVAL_S = 60.0  # between two lines in the log that say that the server is full
_SLOW_S = 1.0  # without a byte, before a connection without a request gives way
_EXCHANGES_A_SECOND = 20.0  # by one address that has its part
_EXCHANGES_AT_ONCE = 64.0


class Connection(Protocol):
    """A connection as far as its place is concerned."""

    def give_way(self) -> None:
        """Closes the connection at once."""


@dataclass(slots=True)
class _Held:
    """The connections of one address; those that wait stand in order, the longest silent first."""

    is_proxy: bool
    num: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    slow: dict[Connection, float] = field(default_factory=dict)  # when the last byte came
    exchanges: float = _EXCHANGES_AT_ONCE  # that it had left at `exchanged_at`
    exchanged_at: float = 0.0

    def exchanges_left(self, now: float) -> float:
        """Returns how many connections may give way to new ones of the address now."""
        since = self.exchanges + (now - self.exchanged_at) * _EXCHANGES_A_SECOND
        return min(_EXCHANGES_AT_ONCE, since)


class Connections:
    """State that the connections of one server share."""

    def __init__(self, num_max: int, num_of_address_max: int, clients: Clients) -> None:
        self.num_lingering = 0  # connections that were refused and are still open
        self._num_max = num_max
        self._num_of_address_max = min(num_of_address_max, num_max)
        self._clients = clients
        self._held: dict[str, _Held] = {}
        self._address_of: dict[Connection, str] = {}
        self._full_told_at = -_FULL_INTERVAL_S

    def enter(self, connection: Connection, peer: str, now: float) -> str:
        """Takes a place. Returns why there is none, or nothing."""
        address = self._clients.address(peer)
        reason, waiting = self._obstacle(address, peer, now)
        if reason and waiting is None:
            self._tell_refusal(address, now)
            return reason
        if waiting is not None:
            if (held := self._held.get(address)) is not None:
                held.exchanges = held.exchanges_left(now) - 1
                held.exchanged_at = now
            self.leave(waiting)
            waiting.give_way()
        self._address_of[connection] = address
        if address not in self._held:
            self._held[address] = _Held(self._clients.is_proxy(peer))
        self._held[address].num += 1
        self.wait(connection, now)
        return ""

    def has_place(self, peer: str, now: float) -> bool:
        """Returns whether `enter` would let in a connection of this peer."""
        reason, waiting = self._obstacle(self._clients.address(peer), peer, now)
        return not reason or waiting is not None

    def _obstacle(self, address: str, peer: str, now: float) -> tuple[str, Connection | None]:
        """Returns why there is no free place, and the connection that may give way."""
        held = self._held.get(address)
        if held is not None and not held.is_proxy and held.num >= self._num_of_address_max:
            may_exchange = held.exchanges_left(now) >= 1
            waiting = _longest_waiting(held, now) if may_exchange else None
            return "your address has too many connections", waiting
        if len(self._address_of) >= self._num_max:
            return "the router has too many connections", self._first_to_go(now)
        return "", None

    def leave(self, connection: Connection) -> None:
        """Frees the place; a second time nothing happens."""
        if (address := self._address_of.pop(connection, None)) is None:
            return
        held = self._held[address]
        held.num -= 1
        held.idle.pop(connection, None)
        held.slow.pop(connection, None)
        if not held.num:
            del self._held[address]

    def wait(self, connection: Connection, now: float) -> None:
        """Notes that the connection waits for more of a request, and that a byte came just now."""
        if (address := self._address_of.get(connection)) is not None:
            self._held[address].slow[connection] = now

    def rest(self, connection: Connection) -> None:
        """Notes that the connection is between two requests."""
        if (address := self._address_of.get(connection)) is not None:
            self._held[address].idle[connection] = None

    def work(self, connection: Connection) -> None:
        """Notes that the connection has a request, or that bytes of one came."""
        if (address := self._address_of.get(connection)) is not None:
            held = self._held[address]
            held.idle.pop(connection, None)
            held.slow.pop(connection, None)

    def is_proxy(self, connection: Connection) -> bool:
        """Returns whether the connection is a trusted proxy's, which has many clients."""
        address = self._address_of.get(connection)
        return address is not None and self._held[address].is_proxy

    def _first_to_go(self, now: float) -> Connection | None:
        for held in sorted(self._held.values(), key=lambda h: (h.is_proxy, -h.num)):
            if (found := _longest_waiting(held, now)) is not None:
                return found
        return None

    def _tell_refusal(self, address: str, now: float) -> None:
        if now - self._full_told_at >= _FULL_INTERVAL_S:
            self._full_told_at = now
            held = self._held.get(address)
            log.warning(
                "HTTP connections are refused: %d are open, %d of them from %s",
                len(self._address_of),
                held.num if held is not None else 0,
                address,
            )


def _longest_waiting(held: _Held, now: float) -> Connection | None:
    for connection in held.idle:
        return connection
    for connection, heard_at in held.slow.items():
        return connection if now - heard_at >= _SLOW_S else None
    return None
