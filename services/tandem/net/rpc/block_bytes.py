"""Encodes and decodes the message BlockBytes without protobuf objects.

Python's protobuf copies the bytes of a field whenever the field is set or read. This module copies
the bytes once to encode a message, and not at all to decode a message. BlockBytes has a single
`bytes` field, so an encoded message is the field's tag, the length of the bytes, and the bytes.
This is the same format that protobuf writes and reads.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

FETCH_BLOCKS = "/tandem.v1.Worker/FetchBlocks"
PROBE = "/tandem.v1.Worker/Probe"
_TAG = b"\x0a"  # protobuf's tag for field 1 with a value of variable length


def encode(parts: Sequence[bytes | memoryview]) -> bytes:
    """Encodes a message. Its field `data` is the concatenation of `parts`."""
    length = sum(len(part) for part in parts)
    header = bytearray(_TAG)
    while length > 0x7F:
        header.append(length & 0x7F | 0x80)
        length >>= 7
    header.append(length)
    return b"".join((header, *parts))


def decode(message: bytes) -> memoryview:
    """Returns the field `data` of a message, without a copy. Raises ValueError if the message is
    malformed."""
    if not message:
        return memoryview(b"")  # proto3 leaves out an empty field, so the message is empty, too
    if message[:1] != _TAG:
        raise ValueError("a received message is not a BlockBytes message")
    length = shift = 0
    at = 1
    while True:
        byte = message[at] if at < len(message) and shift < 64 else -1
        if byte < 0:
            raise ValueError("the BlockBytes message has no valid length field")
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if len(message) - at != length:
        raise ValueError(
            f"the BlockBytes message has {len(message) - at} bytes of data; its length field is "
            f"{length}"
        )
    return memoryview(message)[at:]


class EncodedByHandler(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets the handlers of FETCH_BLOCKS and PROBE yield messages that `encode` has already
    encoded."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in (FETCH_BLOCKS, PROBE):
            return handler
        return grpc.unary_stream_rpc_method_handler(
            handler.unary_stream, request_deserializer=handler.request_deserializer
        )
