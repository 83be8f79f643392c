"""Places of HTTP connections: who gives way to a new one of the same address, and how often."""

from __future__ import annotations

from tandem.api.http.connections import Connections
from tandem.net.security.clients import Clients

ADDRESS = "192.0.2.7"
FULL = "your address has too many open connections; close some or try again later"


class Waiting:
    def __init__(self) -> None:
        self.is_open = True

    def close_now(self) -> None:
        self.is_open = False


def test_an_address_exchanges_its_connections_only_so_often() -> None:
    connections = Connections(num_max=1000, num_of_address_max=100, clients=Clients())
    old = [Waiting() for _ in range(100)]
    assert not any(connections.enter(one, ADDRESS, 0.0) for one in old)
    answers = [connections.enter(Waiting(), ADDRESS, 10.0) for _ in range(80)]
    assert answers == [""] * 64 + [FULL] * 16
    assert [one.is_open for one in old] == [False] * 64 + [True] * 36
    # 20 a second come back; another address has its own.
    later = [connections.enter(Waiting(), ADDRESS, 10.51) for _ in range(12)]
    assert later == [""] * 10 + [FULL] * 2
    assert connections.enter(Waiting(), "192.0.2.8", 10.51) == ""


def test_who_left_is_not_exchanged() -> None:
    connections = Connections(num_max=1000, num_of_address_max=1, clients=Clients())
    for number in range(200):
        one = Waiting()
        assert connections.enter(one, ADDRESS, float(number) / 1000) == ""
        connections.leave(one)
