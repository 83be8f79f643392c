"""Pulls the bytes of blocks from a peer, over the transport that is in use for this peer.

    await puller.pull(peer, lease_id=..., sequence_id=..., run=run, targets=block_ids)

This call pulls one run of blocks, which `peer` has announced under the lease `lease_id`. `targets`
are the ids of the local blocks to fill, one for each block of the run. The local blocks belong to
`sequence_id`. The call returns when every byte is in place. With --verify-blocks, it also compares
checksums before it returns. If the call raises LeaseLost or another TandemError, the blocks are not
valid.

One Puller serves a whole worker. It does not know the lease protocol (lease.py).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import BlockMismatch
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.protocol import BlockPull
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.kv_pulls.bytes_in_flight import BytesInFlight
from tandem.worker.kv_pulls.checksums import verify
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tandem.worker.peers.slow_link import SlowLink

log = logging.getLogger(__name__)


class Puller:
    """Performs all pulls that one worker makes as a consumer."""

    def __init__(
        self,
        config: TransferConfig,
        link: EngineLink,
        *,
        spans: BlockSpans,
        rates: Rates | None = None,
        on_mismatch: Callable[[], None] = lambda: None,
    ) -> None:
        """`rates` records the speed of each pull and sets the deadlines."""
        self._config = config
        self._link = link
        self._spans = spans
        self._rates = rates
        self._on_mismatch = on_mismatch
        self._bounds = BytesInFlight(
            bytes_max=config.pull_bytes_in_flight_max,
            peer_bytes_max=config.pull_bytes_in_flight_max // 2,
        )
        self._slow_link = SlowLink(config.bytes_per_s)

    async def pull(
        self,
        peer: Peer,
        *,
        lease_id: str,
        sequence_id: str,
        run: pb.BlockRun,
        targets: Sequence[int],
    ) -> int:
        """Pulls a run of blocks; returns the number of bytes."""
        assert len(targets) == len(run.block_ids)
        num_bytes = self._spans.num_bytes(targets)
        async with self._bounds.taken(peer.peer_id, num_bytes):
            transport = peer.in_use
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            reservation = self._link.reservations.open(sequence_id, targets)
            try:
                seconds = await transport.pull(
                    BlockPull(
                        lease_id=lease_id,
                        sequence_id=sequence_id,
                        producer_block_ids=run.block_ids,
                        local_block_ids=targets,
                        deadline_s=self._deadline_s(peer, num_bytes),
                    )
                )
                if self._config.bytes_per_s:
                    await self._slow_link.carry(num_bytes, began_at)
                    seconds = loop.time() - began_at
                try:
                    if every := self._config.verify_every:
                        await verify(self._link.pool, sequence_id, run, targets, every)
                except BlockMismatch as error:
                    # If the request has ended meanwhile, its blocks may belong to another request,
                    # and the mismatch means nothing. In that case `check` raises LeaseLost.
                    reservation.check(0, len(targets))
                    log.error(
                        "a block pulled over %s from %s is corrupt, so no block of this pull is "
                        "used: %s",
                        peer.transport,
                        peer.peer_id,
                        error,
                    )
                    self._on_mismatch()
                    raise
            except Exception:
                if self._rates is not None:
                    self._rates.on_pull_failed(peer.worker_id, transport.name)
                raise
            finally:
                self._link.reservations.close(reservation)
        if self._rates is not None:
            self._rates.on_pull(peer.worker_id, transport.name, num_bytes, seconds)
        return num_bytes

    def _deadline_s(self, peer: Peer, num_bytes: int) -> float:
        if self._rates is None:
            return self._config.pull_deadline_s
        return self._rates.pull_deadline_s(peer.worker_id, num_bytes)
