"""Cuts gRPC connections of an address that holds more than its part of them.

gRPC's core accepts connections by itself, and its Python API shows none of them. The kernel does:
they are sockets of this process, and each knows when a byte went through it last. An address may
have too many for a second.
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

from tandem.net.security.clients import Clients

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LOOKED_AT_ONCE = 16  # files, before the event loop gets its turn of the interpreter
_PAUSE_S = 0.0005
# tcpi_last_data_sent and tcpi_last_data_recv in Linux' `struct tcp_info`, both in milliseconds.
_TCP_INFO = struct.Struct("44x I 4x I")


Peer = tuple[str, int]  # address and port of a client's end of a connection


class _Connection(NamedTuple):
    silent_ms: int  # since a byte went either way
    file: int
    peer: Any  # address and port, as the socket gives them


def peer_of(address: str, port: int) -> Peer:
    """Returns the peer in one form, whatever the family of the socket that it came to."""
    found = ipaddress.ip_address(address)
    return str(getattr(found, "ipv4_mapped", None) or found), port


class ConnectionShares:
    """Watches the connections of one port. `run` goes on until it is cancelled."""

    def __init__(self, num_of_address_max: int, clients: Clients) -> None:
        self._num_of_address_max = num_of_address_max
        self._clients = clients

    async def run(self, port: int) -> None:
        """Cuts what is too much, once a second, in a thread."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if num_cut := await asyncio.to_thread(self.cut, port):
                log.info("%d gRPC connections were cut: their address has too many", num_cut)

    def cut_all_but(self, port: int, spared: Collection[Peer]) -> int:
        """Cuts every connection of other peers than these; returns how many."""
        found = [_look(int(file), port) for file in os.listdir("/proc/self/fd")]
        return sum(_cut(one) for one in found if one and peer_of(*one.peer[:2]) not in spared)

    def cut(self, port: int) -> int:
        """Cuts what an address has above its part, the longest silent first; returns how many."""
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


def _look(file: int, port: int) -> _Connection | None:
    """Returns the connection that an open file is; None unless it came to this port."""
    try:
        sock = socket.socket(fileno=file)
    except OSError:
        return None
    try:
        if sock.type != socket.SOCK_STREAM or sock.getsockname()[1:2] != (port,):
            return None
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        sent_ms, received_ms = _TCP_INFO.unpack(told)
        return _Connection(min(sent_ms, received_ms), file, sock.getpeername())
    except (OSError, TypeError):  # it listens, has ended since, or is of another family
        return None
    finally:
        sock.detach()  # gRPC closes it


def _cut(connection: _Connection) -> bool:
    """Ends a connection, as its client could. gRPC notices and closes the file."""
    try:
        # A copy: gRPC may close the file meanwhile, and another one may get its number.
        with socket.socket(fileno=os.dup(connection.file)) as sock:
            if sock.getpeername() != connection.peer:
                return False
            sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False
