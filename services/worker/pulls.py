"""Moves the bytes of blocks for the reader: NIXL reads by the engine process, or gRPC.

    await puller.pull(peer, lease_id=..., sequence_id=..., run=run)

pulls one run (proto BlockRun) of a live lease at `peer` into blocks `run.first_block`.. of the
table of `sequence_id` on this worker's engine, over the transport that the peer has at this moment.
It returns when every byte is in place, and else raises LeaseLost, another TandemError or what gRPC
raises: then nothing of the run may be trusted. Cancelling it ends it; the engine process knows
which blocks a read may still write.

`targets` are the ids of those blocks in this worker's pool, run.block_ids' twins in the same order
(from `Reserved.block_ids`); without them the bytes go through the engine process.

One Puller serves a whole worker. It knows no lease protocol: who may read what and when a pull
counts is lease.py's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from services.config import TransferConfig
from services.errors import LeaseLost
from services.rpc.auth import token_metadata
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.worker.engine_link import EngineLink
from services.worker.messages import StartPull, StoreBytes
from services.worker.peer import Peer
from services.worker.rates import Rates

_ENGINE_MARGIN_S = 5.0


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
    ) -> None:
        """`rates` learns from each pull, and says how long one may take."""
        self._config = config
        self._link = link
        self._token = token
        self._block_bytes = block_bytes
        self._rates = rates

    async def pull(
        self,
        peer: Peer,
        *,
        lease_id: str,
        sequence_id: str,
        run: pb.BlockRun,
        targets: Sequence[int] | None = None,
    ) -> None:
        transport = peer.transport
        num_bytes = len(run.block_ids) * self._block_bytes
        try:
            if transport == "nixl":
                seconds = await self._pull_by_nixl(peer, sequence_id, run)
            else:
                started = time.monotonic()
                await self._pull_by_grpc(peer, lease_id, sequence_id, run)
                seconds = time.monotonic() - started
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
        self, peer: Peer, lease_id: str, sequence_id: str, run: pb.BlockRun
    ) -> None:
        if self._config.delay_s:
            await asyncio.sleep(self._config.delay_s)
        request = pb.FetchBlocksRequest(lease_id=lease_id, block_ids=run.block_ids)
        call = peer.stub.FetchBlocks(
            request,
            metadata=token_metadata(self._token),
            timeout=self._deadline_s(peer, run),
        )
        first, last = run.first_block, run.first_block + len(run.block_ids)
        async for message in call:
            num_blocks, rest = divmod(len(message.data), self._block_bytes)
            if rest or not num_blocks or first + num_blocks > last:
                raise LeaseLost(f"{peer.worker_id} sent bytes that are not the blocks")
            self._link.send(StoreBytes("", sequence_id, first, num_blocks), message.data)
            first += num_blocks
        if first != last:
            raise LeaseLost(f"{peer.worker_id} sent {last - first} blocks too few")
