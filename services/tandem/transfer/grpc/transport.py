"""Reads a peer's blocks over gRPC. Blocks have their own connections, so that these large messages
do not delay the small messages about leases and tokens.

gRPC channels to the same address normally share a connection. So each channel gets its own
subchannel pool.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import grpc.aio

from tandem.common.config.transfer import TransferConfig
from tandem.errors import LeaseLost
from tandem.net.rpc.block_bytes import FETCH_BLOCKS, PROBE, decode
from tandem.net.rpc.channels import close_soon, foreign_cancellation_raises
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.reservations import PoolOwner, PoolReservation
from tandem.transfer.protocol import PROBE_BYTES, BlockPull

log = logging.getLogger(__name__)

# Largest number of parallel streams of a pull. Each stream has its own connection.
STREAMS_MAX = 2
# A pull uses a second stream only if each of the two streams then carries at least this many bytes.
_STREAM_BYTES_MIN = 8 << 20
# Sizes of the probes in bytes. The first probe also opens the connection, so its duration is not
# used.
_PROBES = (1, 1, 256 << 10, PROBE_BYTES, PROBE_BYTES)
# If a probe of more than one byte takes longer than this, the remaining probes are skipped.
_SLOW_PROBE_S = 0.2


class GrpcTransport:
    """A transport that pulls with the gRPC call `FetchBlocks`. A connection opens when it is first
    used."""

    name = "grpc"

    def __init__(
        self,
        worker_id: str,
        address: str,
        owner: PoolOwner,
        config: TransferConfig,
        calls: PeerCalls,
    ) -> None:
        self._worker_id = worker_id
        self._address = address
        self._owner = owner
        self._config = config
        self._calls = calls
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def connect(self, offer: pb.ConnectResponse) -> list[tuple[int, float]]:
        """Measures the connection with probes. Returns (bytes, seconds) of each probe after the
        first.

        After a failed probe, the remaining probes are skipped and no error is raised: the two
        workers have already exchanged gRPC calls, so the connection works.
        """
        took: list[tuple[int, float]] = []
        try:
            for num_bytes in _PROBES:
                took.append((num_bytes, await self.probe(num_bytes)))
                if num_bytes > 1 and took[-1][1] > _SLOW_PROBE_S:
                    break
        except LeaseLost as error:
            log.info("measuring the gRPC connection to %s ended early: %s", self._worker_id, error)
        return took[1:]

    async def probe(self, num_bytes: int) -> float:
        """Fetches `num_bytes` over the connection of the first stream. Returns the seconds it took.

        Raises LeaseLost if the call fails or returns a different number of bytes.
        """
        request = pb.ProbeRequest(num_bytes=num_bytes)
        started = time.monotonic()
        received = 0
        try:
            call = self._call(0, PROBE, request, self._config.connect_deadline_s)
            async for message in call:
                data = decode(message)
                self._owner.pool.write_probe(data)
                received += len(data)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, ValueError) as error:
            raise LeaseLost(
                f"a measurement of the gRPC connection failed: {_describe(error)}"
            ) from None
        if received != num_bytes:
            raise LeaseLost(
                f"a measurement of the gRPC connection returned {received} bytes instead of "
                f"{num_bytes}"
            )
        return time.monotonic() - started

    async def pull(self, pull: BlockPull) -> float:
        started = time.monotonic()
        if self._config.delay_s:
            await asyncio.sleep(self._config.delay_s)
        blocks = self._owner.reservations.open(pull.sequence_id, pull.local_block_ids)
        try:
            async with asyncio.TaskGroup() as streams:
                for number, part in enumerate(self._parts(pull.local_block_ids)):
                    request = pb.FetchBlocksRequest(
                        lease_id=pull.lease_id,
                        block_ids=pull.producer_block_ids[part.start : part.stop],
                    )
                    call = self.fetch(number, request, pull.deadline_s)
                    streams.create_task(self._receive(call, blocks, part))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._owner.reservations.close(blocks)
        return time.monotonic() - started

    def fetch(self, stream: int, request: pb.FetchBlocksRequest, deadline_s: float) -> Any:
        """Starts a FetchBlocks call on the connection number `stream`.

        The call yields raw bytes, which `decode` parses (net/rpc/block_bytes.py).
        """
        return self._call(stream, FETCH_BLOCKS, request, deadline_s)

    def close(self) -> None:
        for channel in self._channels.values():
            close_soon(channel)
        self._channels.clear()

    def _parts(self, block_ids: Sequence[int]) -> list[range]:
        """Splits a pull of `block_ids` into streams. Returns a range of indices of `block_ids` for
        each stream."""
        spans = self._owner.pool.spans
        wanted = spans.num_bytes(block_ids) // _STREAM_BYTES_MIN
        return spans.shares(block_ids, max(1, min(STREAMS_MAX, wanted)))

    async def _receive(self, call: Any, blocks: PoolReservation, part: range) -> None:
        """Writes the call's messages into the pool as they arrive."""
        first = part.start
        pool = self._owner.pool
        closed = LeaseLost(f"the connection to {self._worker_id} was closed")
        try:
            with foreign_cancellation_raises(closed):
                async for message in call:
                    data = decode(message)
                    num_blocks = pool.spans.count(blocks.block_ids[first : part.stop], len(data))
                    if not num_blocks:
                        raise LeaseLost(
                            f"{self._worker_id} sent bytes that are not a whole number of KV blocks"
                        )
                    pool.write(blocks, first, data)
                    first += num_blocks
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, ValueError) as error:
            raise LeaseLost(
                f"KV blocks could not be fetched from {self._worker_id}: {_describe(error)}"
            ) from None
        finally:
            call.cancel()
        if first != part.stop:
            raise LeaseLost(
                f"{self._worker_id} did not send {part.stop - first} of the requested KV blocks"
            )

    def _call(self, stream: int, method: str, request: Any, deadline_s: float) -> Any:
        channel = self._channels.get(stream)
        if channel is None:
            channel = self._calls.open(self._address)
            self._channels[stream] = channel
        call = channel.unary_stream(
            method, request_serializer=type(request).SerializeToString, response_deserializer=None
        )
        return call(request, timeout=deadline_s, metadata=self._calls.metadata)


def _describe(error: BaseException) -> str:
    """Returns the error of a failed call as text."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
