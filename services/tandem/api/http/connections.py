"""Limits the number of HTTP connections, in total and for each client address.

A connection is in one of three states:

  state   meaning                                                next state
  slow    only a part of a request's header has arrived; a new   busy
          connection starts in this state, with no byte
  busy    has a request that is not yet answered                 idle
  idle    all requests are answered                              slow or busy

The limit of each address does not apply to trusted proxies, which serve many clients. If a limit is
reached, a new connection can replace an idle or slow connection, which is closed:

  limit that is reached         the replaced connection belongs to
  connections of one address    the same address
  connections in total          the address with the most connections

Idle connections are replaced first. A slow connection is replaced only if it has sent nothing for
_SLOW_S. Within each of these states, the connection that has waited longest is replaced first. An
address that has reached its limit gets about _REPLACEMENTS_A_SECOND replacements per second,
because a replacement costs more than a refusal. This module does not parse HTTP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_FULL_INTERVAL_S = 60.0  # minimum time between two log messages about refused connections
_SLOW_S = 1.0  # seconds without a byte after which a slow connection can be replaced
# An address that has reached its limit of connections may replace this many of them per second, or
# _REPLACEMENTS_AT_ONCE after a pause.
_REPLACEMENTS_A_SECOND = 20.0
_REPLACEMENTS_AT_ONCE = 64.0


class Connection(Protocol):
    """An HTTP connection that can be closed to make room for another one."""

    def close_now(self) -> None:
        """Closes the connection at once."""


@dataclass(slots=True)
class _Held:
    """The connections of one address. In `idle` and `slow`, the connection that has waited longest
    is first."""

    is_proxy: bool
    num: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    # slow connection -> time on the event loop's clock at which its last byte arrived
    slow: dict[Connection, float] = field(default_factory=dict)
    # number of connections that could still be replaced at the time `replaced_at` (token bucket)
    replacements: float = _REPLACEMENTS_AT_ONCE
    replaced_at: float = 0.0

    def replacements_left(self, now: float) -> float:
        """Returns how many connections of this address may be replaced at `now`. The number grows
        by _REPLACEMENTS_A_SECOND per second, up to _REPLACEMENTS_AT_ONCE (token bucket)."""
        since = self.replacements + (now - self.replaced_at) * _REPLACEMENTS_A_SECOND
        return min(_REPLACEMENTS_AT_ONCE, since)


class Connections:
    """The open connections of one server, and the limits on their number."""

    def __init__(self, num_max: int, num_of_address_max: int, clients: Clients) -> None:
        self.num_lingering = 0  # number of refused connections that are not closed yet
        self._num_max = num_max
        self._num_of_address_max = min(num_of_address_max, num_max)
        self._clients = clients
        self._held: dict[str, _Held] = {}
        self._address_of: dict[Connection, str] = {}
        self._full_logged_at = -_FULL_INTERVAL_S

    def enter(self, connection: Connection, peer: str, now: float) -> str:
        """Registers a new connection, in place of a waiting one if a limit is reached. Returns "",
        or the reason if the connection is refused. `now` is in seconds of the event loop's
        clock."""
        address = self._clients.address(peer)
        reason, waiting = self._check(address, peer, now)
        if reason and waiting is None:
            self._log_refusal(address, now)
            return reason
        if waiting is not None:
            if (held := self._held.get(address)) is not None:
                held.replacements = held.replacements_left(now) - 1
                held.replaced_at = now
            self.leave(waiting)
            waiting.close_now()
        self._address_of[connection] = address
        if address not in self._held:
            self._held[address] = _Held(self._clients.is_proxy(peer))
        self._held[address].num += 1
        self.wait(connection, now)
        return ""

    def has_place(self, peer: str, now: float) -> bool:
        """Returns True if `enter` would accept a connection of this peer."""
        reason, waiting = self._check(self._clients.address(peer), peer, now)
        return not reason or waiting is not None

    def _check(self, address: str, peer: str, now: float) -> tuple[str, Connection | None]:
        """Checks whether a new connection would exceed a limit. Returns (message about the limit,
        connection that can be replaced or None), or ("", None) if no limit is reached."""
        held = self._held.get(address)
        if held is not None and not held.is_proxy and held.num >= self._num_of_address_max:
            may_replace = held.replacements_left(now) >= 1
            waiting = _longest_waiting(held, now) if may_replace else None
            return (
                "your address has too many open connections; close some or try again later",
                waiting,
            )
        if len(self._address_of) >= self._num_max:
            return (
                "the router has too many open connections; try again later",
                self._next_to_replace(now),
            )
        return "", None

    def leave(self, connection: Connection) -> None:
        """Removes a connection from all counts. Repeated calls have no effect."""
        if (address := self._address_of.pop(connection, None)) is None:
            return
        held = self._held[address]
        held.num -= 1
        held.idle.pop(connection, None)
        held.slow.pop(connection, None)
        if not held.num:
            del self._held[address]

    def wait(self, connection: Connection, now: float) -> None:
        """Marks the connection as slow: the rest of a request's header has not arrived. `now` is
        the time of the connection's last byte."""
        if (address := self._address_of.get(connection)) is not None:
            self._held[address].slow[connection] = now

    def rest(self, connection: Connection) -> None:
        """Marks the connection as idle between two requests."""
        if (address := self._address_of.get(connection)) is not None:
            self._held[address].idle[connection] = None

    def work(self, connection: Connection) -> None:
        """Marks the connection as busy: bytes arrived, or a request is being answered."""
        if (address := self._address_of.get(connection)) is not None:
            held = self._held[address]
            held.idle.pop(connection, None)
            held.slow.pop(connection, None)

    def is_proxy(self, connection: Connection) -> bool:
        """Returns True if the connection comes from a trusted proxy."""
        address = self._address_of.get(connection)
        return address is not None and self._held[address].is_proxy

    def _next_to_replace(self, now: float) -> Connection | None:
        for held in sorted(self._held.values(), key=lambda h: (h.is_proxy, -h.num)):
            if (found := _longest_waiting(held, now)) is not None:
                return found
        return None

    def _log_refusal(self, address: str, now: float) -> None:
        if now - self._full_logged_at >= _FULL_INTERVAL_S:
            self._full_logged_at = now
            held = self._held.get(address)
            log.warning(
                "a new HTTP connection from %s is refused: %d connections are open, %d of them "
                "from this address (--connections-max, --connections-per-address)",
                address,
                len(self._address_of),
                held.num if held is not None else 0,
            )


def _longest_waiting(held: _Held, now: float) -> Connection | None:
    for connection in held.idle:
        return connection
    for connection, heard_at in held.slow.items():
        return connection if now - heard_at >= _SLOW_S else None
    return None
