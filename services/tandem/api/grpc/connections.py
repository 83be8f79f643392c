"""Limits the number of gRPC connections of each client address, by closing surplus connections.

gRPC accepts connections in its C core, and its Python API does not list the connections. So this
module looks for them among the open sockets of the process. The socket option TCP_INFO gives the
time of a connection's last traffic. The check runs once a second, so an address may have too many
connections for up to a second.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

from tandem.common.process.ticks import sleep_until_tick
from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# After this many file descriptors the check pauses, so that the event loop can run Python code.
_LOOKED_AT_ONCE = 16
_PAUSE_S = 0.0005
# Two fields of Linux's `struct tcp_info`: milliseconds since data was last sent
# (tcpi_last_data_sent), and since data was last received (tcpi_last_data_recv).
_TCP_INFO = struct.Struct("44x I 4x I")


Peer = tuple[str, int]  # address and port of the client


class _Connection(NamedTuple):
    silent_ms: int  # milliseconds since data was last sent or received
    file: int
    peer: Any  # the client's address and port, in the form of `socket.getpeername`


def peer_of(address: str, port: int) -> Peer:
    """Builds a Peer. An IPv4-mapped IPv6 address becomes an IPv4 address."""
    found = ipaddress.ip_address(address)
    return str(getattr(found, "ipv4_mapped", None) or found), port


class ConnectionShares:
    """Limits the number of connections that each client address has to one port."""

    def __init__(self, num_of_address_max: int, clients: Clients) -> None:
        self._num_of_address_max = num_of_address_max
        self._clients = clients

    async def run(self, port: int) -> None:
        """Calls `cut` once a second, in a thread, until the task is cancelled. Skips the call while
        the process has too few open files for surplus connections."""
        while True:
            await sleep_until_tick(_INTERVAL_S)
            if 0 < _num_files() <= self._num_of_address_max:
                continue
            if num_cut := await asyncio.to_thread(self.cut, port):
                log.info(
                    "%d gRPC connections were closed, because one client address may have "
                    "at most %d open (--connections-per-address)",
                    num_cut,
                    self._num_of_address_max,
                )

    def cut_all_but(self, port: int, spared: Collection[Peer]) -> int:
        """Closes every connection whose peer is not in `spared`. Returns the number of closed
        connections."""
        found = [_look(int(file), port) for file in os.listdir("/proc/self/fd")]
        return sum(_cut(one) for one in found if one and peer_of(*one.peer[:2]) not in spared)

    def cut(self, port: int) -> int:
        """Closes surplus connections: if an address has 12 and 10 are allowed, the 2 that had no
        traffic for the longest time are closed. Returns the number of closed connections."""
        files = os.listdir("/proc/self/fd")
        if len(files) <= self._num_of_address_max:
            return 0
        held: dict[str, list[_Connection]] = defaultdict(list)
        for number, file in enumerate(files):
            if number % _LOOKED_AT_ONCE == 0:
                time.sleep(_PAUSE_S)
            found = _look(int(file), port)
            if found is not None and not self._clients.is_proxy(found.peer[0]):
                held[self._clients.address(found.peer[0])].append(found)
        num_cut = 0
        for connections in held.values():
            connections.sort(reverse=True)
            surplus = max(0, len(connections) - self._num_of_address_max)
            num_cut += sum(_cut(connection) for connection in connections[:surplus])
        return num_cut


def _num_files() -> int:
    """Returns the number of this process's open files; 0 if the kernel is too old to tell it
    without listing them (before Linux 6.2)."""
    return os.stat("/proc/self/fd").st_size


def _look(file: int, port: int) -> _Connection | None:
    """Returns the connection behind a file descriptor. Returns None if the file is not a connection
    to this port."""
    try:
        sock = socket.socket(fileno=file)
    except OSError:
        return None
    try:
        if sock.type != socket.SOCK_STREAM or sock.getsockname()[1:2] != (port,):
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        sent_ms, received_ms = _TCP_INFO.unpack(info)
        return _Connection(min(sent_ms, received_ms), file, sock.getpeername())
    # OSError: the socket listens or is closed. TypeError: its address family has no port.
    except (OSError, TypeError):
        return None
    finally:
        sock.detach()  # `sock` must not close the file descriptor, which gRPC uses.


def _cut(connection: _Connection) -> bool:
    """Shuts a connection down. gRPC sees this as a disconnect of the client and closes the file
    descriptor. Returns False if the connection no longer exists."""
    try:
        # gRPC may close the file descriptor at any time, and the operating system may then reuse
        # the number for another connection. So the descriptor is duplicated first, and then the
        # peer of the duplicate is checked.
        with socket.socket(fileno=os.dup(connection.file)) as sock:
            if sock.getpeername() != connection.peer:
                return False
            sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
