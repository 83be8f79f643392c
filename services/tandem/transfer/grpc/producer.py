"""Serves KV blocks over gRPC to consumers that cannot use NIXL or CUDA IPC. Also serves probes: it
sends zero bytes, and the consumer measures the speed of the connection.

A consumer can read only blocks that a live lease has announced to the consumer. A block is copied
once, from the block pool into a gRPC message. The lease is checked again before each message is
sent, because the engine may reuse the blocks once the lease has ended. A call has at most one
message in memory, because gRPC takes the next message only when the consumer can receive it.
Messages have about 1 MiB, or 16 MiB if the engine process copies the bytes (`PoolView`).
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tandem.net.rpc.block_bytes import encode
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.grpc.reservations import PoolOwner

PROBE_BYTES_MAX = 64 << 20


class BlockServer:
    """Serves the gRPC methods FetchBlocks and Probe. Both yield encoded messages (`encode`)."""

    def __init__(
        self,
        owner: PoolOwner,
        lent: Callable[[str], list[int] | None],
        on_served: Callable[[int], None],
    ) -> None:
        """`lent` maps a lease id to the ids of the blocks that the lease has announced, or to None
        if no lease with this id is live.

        As long as a lease is live, `lent` returns the same list object. Another list object means
        that the lease has ended and a new lease has the same id. `on_served` is called with the
        size of each message in bytes.
        """
        self._owner = owner
        self._lent = lent
        self._on_served = on_served

    async def fetch(self, request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
        """Yields messages with the requested blocks, in the requested order."""
        lease_id = request.lease_id
        lent = self._lent(lease_id)
        if lent is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no lease {lease_id} is open")
        assert lent is not None, "abort raises"
        if not set(lent).issuperset(request.block_ids):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"some of the requested blocks were not announced for lease {lease_id}",
            )
        pool = self._owner.pool
        for block_ids in pool.spans.split(request.block_ids, pool.message_bytes):
            blocks = await pool.read(lease_id, block_ids)
            if self._lent(lease_id) is not lent:
                await context.abort(
                    grpc.StatusCode.ABORTED, "the lease of these KV blocks has ended"
                )
            message = encode(blocks)
            self._on_served(len(message))
            yield message

    async def probe(self, request: pb.ProbeRequest, context: Any) -> AsyncIterator[bytes]:
        """Yields messages with `num_bytes` zero bytes in total. The bytes come from the memory that
        has the pool, so that a probe of a pool on a GPU takes as long as a pull."""
        if request.num_bytes > PROBE_BYTES_MAX:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a measurement may request at most {PROBE_BYTES_MAX} bytes, not "
                f"{request.num_bytes}",
            )
        pool = self._owner.pool
        for first in range(0, request.num_bytes, pool.message_bytes):
            num_bytes = min(pool.message_bytes, request.num_bytes - first)
            yield encode([await pool.read_probe(num_bytes)])
