"""Decides which key a call uses and whether the call is allowed, for both HTTP and gRPC.

These calls need no key:
- All calls, if the cluster has no API key, and the listener's address is loopback or the router was
  started with --allow-anonymous. A cluster whose only key is revoked still has an API key.
- Operators' calls and metrics, if the admin listener's address is loopback. Only users of the
  machine can reach a loopback address, and these users may operate the cluster.

Each listener of a router has its own `Access`.
"""

import functools
import ipaddress
from collections import OrderedDict
from typing import Literal

from tandem.errors import ConfigError, Forbidden, Unauthenticated
from tandem.net.security.body_budget import BodyBudget
from tandem.net.security.clients import Clients
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.keys import KeyRecord, Role, parse_key

Need = Literal["nothing", "user", "metrics", "operator"]

_ROLES: dict[Need, tuple[Role, ...]] = {
    "user": ("user", "operator"),
    "metrics": ("metrics", "operator"),
    "operator": ("operator",),
}
_SCHEME = "bearer"


class Access:
    """The access rules of one listener: which calls a key allows, and which calls need no key."""

    def __init__(
        self,
        ring: KeyRing,
        *,
        is_loopback: bool,
        allows_anonymous: bool = False,
        clients: Clients | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        self.clients = clients or Clients()
        self.bodies = bodies or BodyBudget()
        self.throttle = FailureThrottle()
        self._ring = ring
        self._is_loopback = is_loopback
        self._is_open = is_loopback or allows_anonymous

    def check(self, need: Need, authorization: list[str], *, now: float) -> KeyRecord | None:
        """Returns the record of a call's key, or None if the call needs no key.

        `authorization` has the values of the header `Authorization`. `now` is in seconds since the
        epoch. Raises Unauthenticated, Forbidden and KeysUnknown.
        """
        is_admin = need in ("operator", "metrics")
        if need == "nothing" or (is_admin and self._is_loopback and not authorization):
            return None
        self._ring.check_fresh(now)
        if not self.needs_key:
            return None
        record = self._ring.authenticate(_bearer(authorization), now=now)
        if record.role not in _ROLES[need]:
            allowed = " or ".join(_ROLES[need])
            raise Forbidden(f"the API key's role is {record.role}; this call needs {allowed}")
        return record

    @property
    def needs_key(self) -> bool:
        """True if a client's call needs an API key."""
        return bool(self._ring.records) or not self._is_open

    def claimed(self, authorization: list[str]) -> KeyRecord | None:
        """Returns the record of the key that a refused call names. The secret was not checked, so
        the sender may not have the key. The result is for logs only."""
        try:
            key_id, _ = parse_key(_bearer(authorization))
        except Unauthenticated:
            return None
        return self._ring.records.get(key_id)

    def check_start(self) -> None:
        """Raises ConfigError if there is no API key, the listener has a public address, and the
        router was started without --allow-anonymous.

        A router that could not read the keys may start, because such a router refuses all calls.
        """
        if self._ring.synced_at is not None and not self._ring.records and not self._is_open:
            raise ConfigError(
                "other machines could use the router without an API key: there is no key "
                "yet, and --host or --admin-host is not a loopback address. Create a key "
                "(`tandem keys create`), set --keys-file, or allow requests without a key "
                "(--allow-anonymous)"
            )


class FailureThrottle:
    """Delays responses to an address that repeatedly sends invalid keys."""

    FREE = 5  # failures per minute from one address that are answered without a delay
    DELAY_MAX_S = 2.0
    _WINDOW_S = 60.0
    # Maximum number of addresses whose failures are counted. If there are more, the address whose
    # last failure is the oldest is forgotten.
    _ADDRESSES_MAX = 4096

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def fail(self, address: str, now: float) -> float:
        """Counts a call of `address` with an invalid key at the time `now` (monotonic seconds).
        Returns the seconds by which the caller should delay the response."""
        count, at = self._failures.pop(address, (0.0, now))
        # The count decreases by FREE in _WINDOW_S seconds, so that old failures no longer count.
        count = max(0.0, count - self.FREE * (now - at) / self._WINDOW_S) + 1
        self._failures[address] = (count, now)
        if len(self._failures) > self._ADDRESSES_MAX:
            self._failures.popitem(last=False)
        over = count - self.FREE
        return 0.0 if over <= 0 else min(self.DELAY_MAX_S, 0.1 * 2 ** min(over, 10.0))


def _bearer(authorization: list[str]) -> str:
    """Returns the API key in the header `Authorization` (RFC 6750). Raises Unauthenticated if there
    is not exactly one header with a key."""
    if not authorization:
        raise Unauthenticated("the call needs an API key: send Authorization: Bearer KEY")
    scheme, _, key = authorization[0].partition(" ")
    if len(authorization) > 1 or scheme.lower() != _SCHEME:
        raise Unauthenticated("send one header Authorization: Bearer KEY")
    return key.strip()


@functools.lru_cache(maxsize=64)
def is_loopback(name: str) -> bool:
    """Returns True if a host name or an address is loopback."""
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
