"""The message BlockBytes as it goes over the wire, made and read without a protobuf object.

protobuf in Python copies a field's bytes when it is set and when it is read. A message of one
`bytes` field is its tag, its length and the bytes: so one copy makes it, and none reads it. Who
sends and who reads may each do it either way, it is the same message.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

FETCH_BLOCKS = "/tandem.v1.Worker/FetchBlocks"
PROBE = "/tandem.v1.Worker/Probe"
_TAG = b"\x0a"  # field 1, length-delimited


def encode(parts: Sequence[bytes | memoryview]) -> bytes:
    """The message whose `data` is the parts, one after another."""
    length = sum(len(part) for part in parts)
    header = bytearray(_TAG)
    while length > 0x7F:
        header.append(length & 0x7F | 0x80)
        length >>= 7
    header.append(length)
    return b"".join((header, *parts))


def decode(message: bytes) -> memoryview:
    """`data` of a message, in place. Raises ValueError when it is no such message."""
    if not message:
        return memoryview(b"")  # proto3 leaves an empty field out
    if message[:1] != _TAG:
        raise ValueError("not a BlockBytes message")
    length = shift = 0
    at = 1
    while True:
        byte = message[at] if at < len(message) and shift < 64 else -1
        if byte < 0:
            raise ValueError("a BlockBytes message without a length")
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if len(message) - at != length:
        raise ValueError(f"a BlockBytes message of {len(message) - at} bytes that says {length}")
    return memoryview(message)[at:]


class EncodedByHandler(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets the handlers of the two calls yield messages that `encode` made."""

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
