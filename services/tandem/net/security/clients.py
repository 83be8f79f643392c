"""Determines the client address of a request, and limits the open requests of each address.

Behind a proxy, all connections come from the proxy's address. A trusted proxy adds the address of a
request's sender to the header `X-Forwarded-For`. The header of any other sender is ignored. IPv6
addresses of one /64 network count as one client, because one host can use all of them.
"""

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tandem.errors import TooManyRequests

_HOPS_MAX = 16  # only this many entries, the last ones of `X-Forwarded-For`, are read
_RETRY_AFTER_S = 1.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Clients:
    """Determines client addresses, and counts the open requests of each address. An address may
    have `requests_max` open requests."""

    def __init__(self, trusted_proxies: Iterable[str] = (), *, requests_max: int = 1 << 30) -> None:
        self._proxies = [ipaddress.ip_network(proxy) for proxy in trusted_proxies]
        self._requests_max = requests_max
        self._num_requests: Counter[str] = Counter()

    def is_proxy(self, peer: str) -> bool:
        """Returns True if `peer`, the other end of a connection, is a trusted proxy."""
        address = _parse(peer)
        return address is not None and self._is_proxy(address)

    def address(self, peer: str, forwarded: Sequence[str] = ()) -> str:
        """Returns the client's address. `peer` is the address of the connection's other end, and
        `forwarded` has the values of the header `X-Forwarded-For`.

        If `peer` is not a trusted proxy, the result is `peer`. Otherwise the result is the last
        address in `forwarded` that is not a trusted proxy."""
        found = _parse(peer)
        if found is None:
            return peer
        hops = ",".join(forwarded).split(",")[-_HOPS_MAX:]
        while hops and self._is_proxy(found):
            hop = _parse(hops.pop())
            if hop is None:
                break
            found = hop
        if found.version == 6:
            return str(ipaddress.ip_network((found, 64), strict=False))
        return str(found)

    @contextlib.contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Counts a request of `address` as open for the duration of the context. Raises
        TooManyRequests if the address has too many open requests."""
        if self._num_requests[address] >= self._requests_max:
            raise TooManyRequests(
                f"your address already waits for answers to {self._requests_max} requests, which "
                "is the limit (--requests-per-address)",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_requests[address] += 1
        try:
            yield
        finally:
            self._num_requests[address] -= 1
            if not self._num_requests[address]:
                del self._num_requests[address]

    def _is_proxy(self, address: _Address) -> bool:
        return any(address in network for network in self._proxies)


def _parse(text: str) -> _Address | None:
    """Parses an IP address. The text may include a port, which some proxies add. Returns None if
    the text is malformed."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
