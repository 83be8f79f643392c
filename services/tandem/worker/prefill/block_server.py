"""Bytes of blocks for readers without NIXL, and bytes to measure a pair with.

A reader gets blocks that a live lease has announced to it, and nothing else. A block is copied once
here, from the pool into a message of gRPC; the lease is looked at anew for each message, so that
nothing is read once the stream has ended and the engine may have reused the blocks.

Not more than one message of a call is here at a time: gRPC takes the next when its peer has room.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.rpc.block_bytes import encode
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.prefill.leases import Leases

MESSAGE_BYTES = 1 << 20  # about; whole blocks, at least one
PROBE_BYTES_MAX = 64 << 20


class BlockServer:
    """FetchBlocks and Probe; both yield messages that `encode` made."""

    def __init__(
        self, link: EngineLink, leases: Leases, metrics: WorkerMetrics, *, block_bytes: int
    ) -> None:
        self._link = link
        self._leases = leases
        self._metrics = metrics
        self._blocks_a_message = max(1, round(MESSAGE_BYTES / block_bytes))

    async def fetch(self, request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
        """The blocks in the order asked for, whole blocks a message."""
        lease = self._leases.get(request.lease_id)
        if lease is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no lease {request.lease_id} is open")
        assert lease is not None, "abort raises"
        if not set(lease.block_ids).issuperset(request.block_ids):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "the lease did not announce these blocks"
            )
        for first in range(0, len(request.block_ids), self._blocks_a_message):
            block_ids = request.block_ids[first : first + self._blocks_a_message]
            blocks = await self._link.pool.read(lease.lease_id, block_ids)
            if self._leases.get(lease.lease_id) is not lease:
                await context.abort(grpc.StatusCode.ABORTED, "the lease has ended")
            message = encode(blocks)
            self._metrics.kv_bytes_served.inc(len(message))
            yield message

    async def probe(self, request: pb.ProbeRequest, context: Any) -> AsyncIterator[bytes]:
        """Bytes that mean nothing, in messages of the size that blocks come in."""
        if request.num_bytes > PROBE_BYTES_MAX:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a probe has at most {PROBE_BYTES_MAX} bytes, not {request.num_bytes}",
            )
        zeros = bytes(min(request.num_bytes, MESSAGE_BYTES))
        whole = encode([zeros])
        for _ in range(request.num_bytes // MESSAGE_BYTES):
            yield whole
        if rest := request.num_bytes % MESSAGE_BYTES:
            yield encode([zeros[:rest]])
