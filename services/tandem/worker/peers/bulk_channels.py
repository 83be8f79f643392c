"""Connections for the bytes of blocks, apart from the one that carries leases and tokens.

gRPC's channels of one process share a connection to the same address, unless each has a pool of
subchannels of its own; then a large message on one of them delays no small one on another.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from tandem.errors import LeaseLost
from tandem.rpc.auth import token_metadata
from tandem.rpc.block_bytes import FETCH_BLOCKS, PROBE, decode
from tandem.rpc.options import BULK_CHANNEL_OPTIONS
from tandem.rpc.tandem.v1 import worker_pb2 as pb

STREAMS_MAX = 2  # of one peer, each on a connection of its own


class BulkChannels:
    """To one peer. Nothing is opened before it is used."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channels: dict[int, grpc.aio.Channel] = {}

    def fetch(self, stream: int, request: pb.FetchBlocksRequest, **options: Any) -> Any:
        """A call of FetchBlocks whose messages are bytes (services/tandem/rpc/block_bytes.py)."""
        return self._call(stream, FETCH_BLOCKS, pb.FetchBlocksRequest)(request, **options)

    def probe(self, request: pb.ProbeRequest, **options: Any) -> Any:
        return self._call(0, PROBE, pb.ProbeRequest)(request, **options)

    def close(self) -> None:
        """Ends what is under way; nothing may be called afterwards."""
        for channel in self._channels.values():
            closing = asyncio.ensure_future(channel.close(None))
            closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._channels.clear()

    def _call(self, stream: int, method: str, request: Any) -> Any:
        channel = self._channels.get(stream)
        if channel is None:
            channel = grpc.aio.insecure_channel(self._address, options=BULK_CHANNEL_OPTIONS)
            self._channels[stream] = channel
        return channel.unary_stream(
            method, request_serializer=request.SerializeToString, response_deserializer=None
        )


async def probe_grpc(bulk: BulkChannels, num_bytes: int, *, token: str, deadline_s: float) -> float:
    """Seconds that so many bytes take from a peer, over what its blocks come over.

    Raises LeaseLost.
    """
    request = pb.ProbeRequest(num_bytes=num_bytes)
    started = time.monotonic()
    received = 0
    try:
        call = bulk.probe(request, timeout=deadline_s, metadata=token_metadata(token))
        async for message in call:
            received += len(decode(message))
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, ValueError) as error:
        raise LeaseLost(f"a probe failed: {describe(error)}") from None
    if received != num_bytes:
        raise LeaseLost(f"a probe brought {received} bytes, not {num_bytes}")
    return time.monotonic() - started


def describe(error: BaseException) -> str:
    """A failed call, for a message."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
