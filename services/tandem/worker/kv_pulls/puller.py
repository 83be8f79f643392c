"""Moves the bytes of blocks for the reader: NIXL reads by the engine process, or gRPC.

    await puller.pull(peer, lease_id=..., sequence_id=..., run=run, targets=block_ids)

pulls one run (proto BlockRun) of a live lease at `peer` into `targets`: blocks `run.first_block`..
of the table of `sequence_id` on this worker's engine, by their ids and in the run's order. It goes
over the transport that the peer has at this moment, and returns when every byte is in place and,
with --verify-blocks, compared. Else it raises LeaseLost or another TandemError: then nothing of the
run may be trusted. Cancelling it ends it; of NIXL the engine process knows which blocks a read may
still write, and by gRPC nothing is written once the engine was told of the end (pool_view.py).

One Puller serves a whole worker. It knows no lease protocol: who may read what and when a pull
counts is lease.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from tandem.config import TransferConfig
from tandem.errors import BlockMismatch, LeaseLost
from tandem.rpc.auth import token_metadata
from tandem.rpc.block_bytes import decode
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import StartPull
from tandem.worker.engine_process.pool_view import Reservation
from tandem.worker.kv_pulls.bytes_in_flight import BytesInFlight
from tandem.worker.kv_pulls.checksums import verify
from tandem.worker.peers.bulk_channels import STREAMS_MAX, describe
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates

log = logging.getLogger(__name__)

_ENGINE_MARGIN_S = 5.0
_STREAM_BYTES_MIN = 8 << 20  # of one stream, when a pull goes by several


class Puller:
    """All pulls of one worker as a reader."""

    def __init__(
        self,
        config: TransferConfig,
        link: EngineLink,
        *,
        token: str,
        block_bytes: int,
        rates: Rates | None = None,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        """`rates` learns from each pull, and says how long one may take."""
        self._config = config
        self._link = link
        self._token = token
        self._block_bytes = block_bytes
        self._rates = rates
        self._on_mismatch = on_mismatch
        self._bounds = BytesInFlight(
            bytes_max=config.pull_bytes_in_flight_max,
            peer_bytes_max=config.pull_bytes_in_flight_max // 2,
        )

    async def pull(
        self,
        peer: Peer,
        *,
        lease_id: str,
        sequence_id: str,
        run: pb.BlockRun,
        targets: Sequence[int],
    ) -> None:
        assert len(targets) == len(run.block_ids)
        num_bytes = len(targets) * self._block_bytes
        async with self._bounds.taken(peer.peer_id, num_bytes):
            transport = peer.transport
            try:
                if transport == "nixl":
                    seconds = await self._pull_by_nixl(peer, sequence_id, run)
                else:
                    seconds = await self._pull_by_grpc(peer, lease_id, sequence_id, run, targets)
                await self._verify(peer, sequence_id, run, targets)
            except Exception:
                if self._rates is not None:
                    self._rates.on_pull_failed(peer.worker_id, transport)
                raise
        if self._rates is not None:
            self._rates.on_pull(peer.worker_id, transport, num_bytes, seconds)

    def _deadline_s(self, peer: Peer, run: pb.BlockRun) -> float:
        if self._rates is None:
            return self._config.pull_deadline_s
        num_bytes = len(run.block_ids) * self._block_bytes
        return self._rates.pull_deadline_s(peer.worker_id, num_bytes)

    async def _pull_by_nixl(self, peer: Peer, sequence_id: str, run: pb.BlockRun) -> float:
        """Returns the seconds that the read itself took."""
        deadline_s = self._deadline_s(peer, run)
        pull = StartPull(
            pull_id=uuid.uuid4().hex,
            sequence_id=sequence_id,
            peer_id=peer.peer_id,
            first_block=run.first_block,
            source_block_ids=list(run.block_ids),
            deadline_s=deadline_s,
        )
        # The transfer thread keeps the deadline; the margin is for an engine that hangs.
        async with asyncio.timeout(deadline_s + _ENGINE_MARGIN_S):
            result = await self._link.pull(pull)
        if not result.done:
            raise LeaseLost(f"a read from {peer.worker_id} failed: {result.error}")
        return result.elapsed_s

    async def _pull_by_grpc(
        self,
        peer: Peer,
        lease_id: str,
        sequence_id: str,
        run: pb.BlockRun,
        targets: Sequence[int],
    ) -> float:
        started = time.monotonic()
        deadline_s = self._deadline_s(peer, run)
        if self._config.delay_s:
            await asyncio.sleep(self._config.delay_s)
        blocks = self._link.reservations.open(sequence_id, run.first_block, targets)
        try:
            async with asyncio.TaskGroup() as streams:
                for number, part in enumerate(self._parts(len(targets))):
                    request = pb.FetchBlocksRequest(
                        lease_id=lease_id, block_ids=run.block_ids[part.start : part.stop]
                    )
                    call = peer.bulk.fetch(number, request, **self._options(deadline_s))
                    streams.create_task(self._receive(peer, call, blocks, part))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._link.reservations.close(blocks)
        return time.monotonic() - started

    def _parts(self, num_blocks: int) -> list[range]:
        """The blocks of each stream."""
        wanted = num_blocks * self._block_bytes // _STREAM_BYTES_MIN
        size = -(-num_blocks // max(1, min(STREAMS_MAX, wanted, num_blocks)))
        return [range(first, min(first + size, num_blocks)) for first in range(0, num_blocks, size)]

    async def _receive(self, peer: Peer, call: Any, blocks: Reservation, part: range) -> None:
        """Writes what comes into the pool, message by message."""
        first = part.start
        try:
            async for message in call:
                data = decode(message)
                num_blocks = len(data) // self._block_bytes
                if not num_blocks or first + num_blocks > part.stop:
                    raise LeaseLost(f"{peer.worker_id} sent bytes that are not the blocks")
                self._link.pool.write(blocks, first, data)
                first += num_blocks
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, ValueError) as error:
            raise LeaseLost(f"bytes from {peer.worker_id}: {describe(error)}") from None
        except asyncio.CancelledError:
            # A channel that is closed under a call cancels it; that is not our cancellation.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise LeaseLost(f"the connection to {peer.worker_id} was closed") from None
        finally:
            call.cancel()
        if first != part.stop:
            raise LeaseLost(f"{peer.worker_id} sent {part.stop - first} blocks too few")

    async def _verify(
        self, peer: Peer, sequence_id: str, run: pb.BlockRun, targets: Sequence[int]
    ) -> None:
        if not (every := self._config.verify_every):
            return
        try:
            await verify(self._link.pool, sequence_id, run, targets, every)
        except BlockMismatch as error:
            log.error("%s over %s of %s", error, peer.transport, peer.peer_id)
            self._on_mismatch()
            raise

    def _options(self, deadline_s: float) -> dict[str, Any]:
        return {"timeout": deadline_s, "metadata": token_metadata(self._token)}
