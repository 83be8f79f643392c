"""The addresses that clients come from: whose request it is, and how many are unanswered. Pure.

A proxy hides its clients. One that is trusted names them in `X-Forwarded-For`; from anyone else the
header is a client's own word and is ignored. An IPv6 client is its /64 network, since one host
has all addresses of it.
"""

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tandem.errors import TooManyRequests

_HOPS_MAX = 16  # entries of a header that are looked at
_RETRY_AFTER_S = 1.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Clients:
    """The addresses of a router's clients. `requests_max` is the bound of each."""

    def __init__(self, trusted_proxies: Iterable[str] = (), *, requests_max: int = 1 << 30) -> None:
        self._proxies = [ipaddress.ip_network(proxy) for proxy in trusted_proxies]
        self._requests_max = requests_max
        self._num_requests: Counter[str] = Counter()

    def is_proxy(self, peer: str) -> bool:
        """Returns whether a connection's other end is a trusted proxy."""
        address = _parse(peer)
        return address is not None and self._is_proxy(address)

    def address(self, peer: str, forwarded: Sequence[str] = ()) -> str:
        """Returns the client's address: the last one on the way that is no trusted proxy.

        `forwarded` has the values of `X-Forwarded-For`.
        """
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
        """Counts a request while it is unanswered. Raises TooManyRequests."""
        if self._num_requests[address] >= self._requests_max:
            raise TooManyRequests(
                f"{self._requests_max} requests of your address have no answer yet; more are not "
                "taken",
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
    """Reads an address, also as proxies write one with its port; None for anything else."""
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
