"""Settings of what one client's address may take of a router."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from tandem.common.config.groups import HTTP
from tandem.common.options import Count, Options, by_comma
from tandem.errors import ConfigError


def _parse_proxies(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(" ", "").split(",")))


@Parameter(name="*", group=HTTP)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddressConfig(Options):
    """The share of a router that one address gets, over HTTP and over gRPC."""

    trusted_proxies: Annotated[tuple[str, ...], by_comma("CIDR,...", _parse_proxies)] = ()
    """Proxies whose X-Forwarded-For names the client. From others the header is ignored."""
    connections_per_address: Count = 0
    """Largest number of connections of an address, except of proxies. 0: half of them all."""
    requests_per_address: Count = 0
    """Largest number of unanswered requests of an address. 0: half of --connections-max."""

    unparsed_bytes_per_address: Count = 0
    """Bytes of --unparsed-bytes-max that one address may have. 0: half of them."""

    def check_together(self) -> None:
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"trusted-proxies has {proxy!r}; it must be an address or a network such as "
                    f"10.0.0.0/8: {error}"
                ) from None
