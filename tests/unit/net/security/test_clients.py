"""Clients are told apart by address, behind proxies too, and their requests are counted."""

from __future__ import annotations

import contextlib

import pytest

from tandem.common.config.router import AddressConfig
from tandem.errors import ConfigError, TooManyRequests
from tandem.net.security.clients import Clients

PROXIES = ("10.0.0.0/8", "2001:db8:f::/48", "127.0.0.1")


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["203.0.113.7"], "192.0.2.1"),  # no proxy: the header is its own word
        ("10.1.1.1", ["203.0.113.7"], "203.0.113.7"),
        ("10.1.1.1", ["198.51.100.1, 203.0.113.7"], "203.0.113.7"),  # the first is made up
        ("10.1.1.1", ["198.51.100.1", "203.0.113.7"], "203.0.113.7"),  # two headers
        ("10.1.1.1", ["203.0.113.7, 10.2.2.2 ,127.0.0.1"], "203.0.113.7"),  # three proxies
        ("10.1.1.1", ["10.2.2.2"], "10.2.2.2"),  # proxies all the way
        ("10.1.1.1", ["203.0.113.7, unknown"], "10.1.1.1"),
        ("10.1.1.1", [""], "10.1.1.1"),
        ("10.1.1.1", ["203.0.113.7:5678"], "203.0.113.7"),
        ("10.1.1.1", ["[2001:db8::1]:5678"], "2001:db8::/64"),
        ("2001:db8:f::1", ["2001:db8::1"], "2001:db8::/64"),
        ("::ffff:10.1.1.1", ["::ffff:203.0.113.7"], "203.0.113.7"),
        ("fe80::1%eth0", [], "fe80::/64"),
        ("unknown", ["203.0.113.7"], "unknown"),
        ("10.1.1.1", ["203.0.113.7," + "10.0.0.1," * 100 + "10.0.0.2"], "10.0.0.1"),
    ],
)
def test_the_client_is_the_last_that_is_no_proxy(
    peer: str, forwarded: list[str], address: str
) -> None:
    assert Clients(PROXIES).address(peer, forwarded) == address


def test_without_proxies_the_header_is_ignored() -> None:
    assert Clients().address("10.1.1.1", ["203.0.113.7"]) == "10.1.1.1"


def test_unanswered_requests_of_an_address_are_counted() -> None:
    clients = Clients(requests_max=2)
    with contextlib.ExitStack() as held:
        held.enter_context(clients.request("a"))
        held.enter_context(clients.request("a"))
        with pytest.raises(TooManyRequests) as refused, clients.request("a"):
            pass
        assert refused.value.retry_after_whole_s == 1
        held.enter_context(clients.request("b"))
    with clients.request("a"):
        pass
    assert not clients._num_requests


@pytest.mark.parametrize("proxy", ["x", "10.0.0.1/8", "10.0.0.0/33", "localhost"])
def test_a_proxy_that_is_no_network_is_refused(proxy: str) -> None:
    with pytest.raises(ConfigError, match="trusted-proxies has"):
        AddressConfig(trusted_proxies=(proxy,))
