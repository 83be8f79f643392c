"""Clients that hold connections without requests, in their own process.

python -m tests.harness.slow_clients silent --port 8000 --number 10000

They connect from 127.0.0.2. Connections that the server closes are reopened at the rate of
`--reopen`. The process prints `open` after it has tried all of them, and ends at EOF of stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ADDRESS = "127.0.0.2"
DRIP_S = 2.0  # interval between two bytes on a connection
_OPENED_AT_ONCE = 200
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes.fromhex("000000040000000000")


@dataclass(frozen=True)
class Kind:
    """A kind of slow client: it sends `begin` at once, and then `drip` repeatedly."""

    begin: bytes = b""
    drip: bytes = b""
    is_grpc: bool = False


KINDS = {
    "silent": Kind(),
    "partial-header": Kind(_HEAD),
    "dripping-header": Kind(_HEAD + b"x-fill: ", b"x"),
    "partial-body": Kind(_HEAD + b"content-type: application/json\r\n\r\n{"),
    "keep-alive": Kind(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    "grpc-silent": Kind(is_grpc=True),
    "grpc-half-open": Kind(_PREFACE[:10], is_grpc=True),
    "grpc-idle": Kind(_PREFACE + _SETTINGS, is_grpc=True),
}


@dataclass
class SlowClients:
    """Keeps `number` connections to a port open, as far as the server allows."""

    kind: Kind
    port: int
    number: int
    reopen_a_second: float
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _open: dict[socket.socket, None] = field(default_factory=dict)

    def run(self, is_over: Callable[[], bool], on_open: Callable[[], None]) -> None:
        """Runs until `is_over` returns True."""
        num_first = 0
        dripped_at = reopened_at = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if num_first < self.number:
                count = min(_OPENED_AT_ONCE, self.number - num_first)
                num_first += count
                self._connect(count)
                if num_first == self.number:
                    on_open()
                    reopened_at = now
            else:
                count = int((now - reopened_at) * self.reopen_a_second)
                if count:
                    reopened_at = now
                    self._connect(min(count, self.number - len(self._open)))
            self._take_answers(0.05)
            if self.kind.drip:
                self._drip((now - dripped_at) / DRIP_S)
                dripped_at = now

    def _connect(self, count: int) -> None:
        made = []
        for _ in range(count):
            sock = socket.socket()
            sock.bind((ADDRESS, 0))
            try:
                sock.connect(("127.0.0.1", self.port))
            except OSError:
                sock.close()
                continue
            sock.setblocking(False)
            self._open[sock] = None
            self._selector.register(sock, selectors.EVENT_READ)
            made.append(sock)
        self._send(made, self.kind.begin)

    def _drip(self, part: float) -> None:
        """Sends a byte on this share of the connections, those idle for longest."""
        due = list(itertools.islice(self._open, int(min(1.0, part) * len(self._open)) + 1))
        for sock in due:
            self._open[sock] = self._open.pop(sock)
        self._send(due, self.kind.drip)

    def _send(self, socks: list[socket.socket], data: bytes) -> None:
        for sock in socks:
            with contextlib.suppress(BlockingIOError):
                try:
                    sock.send(data)
                except ConnectionError:
                    self._drop(sock)

    def _take_answers(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                data = sock.recv(1 << 14)
            except OSError:
                data = b""
            if not data:
                self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._open[sock]
        sock.close()


@contextlib.contextmanager
def slow_clients(kind: str, port: int, number: int, *, reopen: float = 200.0) -> Iterator[None]:
    """Starts the clients in their own process. Inside the context, all of them have tried to
    connect."""
    command = [sys.executable, "-m", "tests.harness.slow_clients"]
    command += [kind, "--port", str(port)]
    command += ["--number", str(number), "--reopen", str(reopen)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            yield
        finally:
            # With SCHED_IDLE it could not end on a busy machine.
            os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))
            process.stdin.close()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--reopen", type=float, default=200.0, help="connections a second")
    arguments = parser.parse_args()
    # They simulate other machines, so their work must not take the router's cores.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    clients = SlowClients(KINDS[arguments.kind], arguments.port, arguments.number, arguments.reopen)
    stdin = selectors.DefaultSelector()
    stdin.register(sys.stdin, selectors.EVENT_READ)
    clients.run(lambda: bool(stdin.select(0)), lambda: print("open", flush=True))


if __name__ == "__main__":
    main()
