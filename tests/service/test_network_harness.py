"""The network that other tests stand on is what it says: late, slow, lossy, and cut when told."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.network import Network, Place, Shape, why_not

pytestmark = pytest.mark.service

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

DEADLINE_S = 20.0
# Echoes the first byte of each connection, then counts bytes until the end and answers the count.
_SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 5001))
print("up", flush=True)
while True:
    client, _ = server.accept()
    client.sendall(client.recv(1))
    count = 0
    while data := client.recv(1 << 20):
        count += len(data)
    client.sendall(b"%d" % count)
    client.close()
"""


@contextmanager
def server_at(place: Place) -> Iterator[None]:
    command = [*place.prefix, sys.executable, "-c", _SERVER, place.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def connect(place: Place) -> socket.socket:
    return socket.create_connection((place.address, 5001), DEADLINE_S)


def echo_s(connection: socket.socket) -> float:
    started = time.monotonic()
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
    return time.monotonic() - started


def send(connection: socket.socket, num_bytes: int) -> float:
    """Seconds until the server has said that all of it came."""
    started = time.monotonic()
    connection.sendall(b"x" * num_bytes)
    connection.shutdown(socket.SHUT_WR)
    assert int(connection.recv(100)) == num_bytes
    return time.monotonic() - started


def num_sent_again(connection: socket.socket) -> int:
    """Returns `tcpi_total_retrans` of linux/tcp.h."""
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(found[100:104], sys.byteorder)


def test_a_packet_takes_the_delay_each_way() -> None:
    with Network(1, Shape(delay_s=0.02)) as network, server_at(network.hosts[0]):
        rounds = []
        for _ in range(5):
            with connect(network.hosts[0]) as connection:
                rounds.append(echo_s(connection))
        assert min(rounds) >= 0.04
        print(f"round trips of 40 ms: {statistics.median(rounds) * 1e3:.2f} ms")


def test_bytes_go_no_faster_than_the_rate() -> None:
    with Network(1, Shape(bytes_per_s=10e6)) as network, server_at(network.hosts[0]):
        with connect(network.hosts[0]) as connection:
            echo_s(connection)
            took_s = send(connection, 20_000_000)
        assert took_s >= 20 / 10 * 0.95  # a full queue of 1.5 MB is sent when the last is written
        print(f"10 MB/s: {20 / took_s:.2f} MB/s of payload")


def test_all_bytes_come_through_loss_by_being_sent_again() -> None:
    with Network(1, Shape(delay_s=0.005, loss=0.05)) as network, server_at(network.hosts[0]):
        with connect(network.hosts[0]) as connection:
            echo_s(connection)
            took_s = send(connection, 1_000_000)
            again = num_sent_again(connection)
        print(f"1 MB at 5 ms with 5% loss: {took_s:.3f} s, {again} packets sent again")
        assert again > 10  # of about 700, 35 are lost
        network.shape(network.hosts[0], Shape(delay_s=0.005))
        with connect(network.hosts[0]) as connection:
            echo_s(connection)
            print(f"without loss: {send(connection, 1_000_000):.3f} s")
            # None is lost; on a busy machine an answer that comes late looks so once or twice.
            assert num_sent_again(connection) < again / 4


def test_a_cut_host_is_silent_until_it_is_healed() -> None:
    with (
        Network(2) as network,
        server_at(network.hosts[0]),
        server_at(network.hosts[1]),
        connect(network.hosts[0]) as connection,
        connect(network.hosts[1]) as other,
    ):
        echo_s(connection)
        network.cut(network.hosts[0])
        connection.sendall(b"y" * 1000)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        echo_s(other)
        network.heal(network.hosts[0])
        connection.settimeout(DEADLINE_S)
        assert connection.recv(100) == b"1000"


def test_hosts_reach_one_another_over_both_cables() -> None:
    with Network(2, Shape(delay_s=0.01)) as network, server_at(network.hosts[0]):
        ask = (
            "import socket, time; started = time.monotonic(); "
            f"socket.create_connection(({network.hosts[0].address!r}, 5001), 20); "
            "print(time.monotonic() - started)"
        )
        command = [*network.hosts[1].prefix, sys.executable, "-c", ask]
        took_s = float(subprocess.run(command, capture_output=True, check=True).stdout)
        assert took_s >= 0.04


def test_nothing_is_left_of_a_closed_network() -> None:
    with Network(1) as network:
        names = (network.home.device, network.hosts[0].namespace)
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert names[0] not in links
    assert names[1] not in spaces
