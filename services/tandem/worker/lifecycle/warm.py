"""Fills a new worker's cache from its peers, so that it does not start cold.

A chain has the hashes of successive blocks, from the first block of a prompt on. Each chain is
imported in four steps:

    1. `ListChains`: a peer names the chains that it used most recently.
    2. `ImportBlocks`: the local engine reserves free blocks for a chain.
    3. The blocks are pulled from the peer.
    4. `CommitImport`: the local engine caches the pulled blocks.

The import runs in the background after the worker has joined. Requests have priority, and no block
is evicted for the import. Blocks that cannot be imported are skipped. If two chains begin with the
same blocks, only the import of the first chain pulls them.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable

import grpc.aio

from tandem.common.config.worker import WorkerConfig
from tandem.engine.types import Reserved, StepReport
from tandem.errors import TandemError, from_code
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.engine_process.link import ANSWER_DEADLINE_S, EngineLink
from tandem.worker.engine_process.messages import CommitImport, ImportBlocks, Remove
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.peer import Peer
from tandem.worker.prefill.prefix_pull import PrefixPuller

log = logging.getLogger(__name__)

CHAIN_DEADLINE_S = 60.0


class Warmer:
    """Imports up to `warm_blocks` blocks from peers. The worker calls `on_step` after each step."""

    def __init__(
        self, config: WorkerConfig, link: EngineLink, prefixes: PrefixPuller, metrics: WorkerMetrics
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._link = link
        self._prefixes = prefixes
        self._reserved: dict[str, asyncio.Future[Reserved]] = {}
        self._num_warmed = 0

    def on_step(self, step: StepReport) -> None:
        for reserved in step.reserved:
            if (future := self._waiting(reserved.sequence_id)) is not None:
                future.set_result(reserved)
        for failed in step.failed:
            if (future := self._waiting(failed.sequence_id)) is not None:
                future.set_exception(from_code(failed.code, failed.message))

    async def run(self, peers: Iterable[Peer]) -> None:
        """Imports chains until `warm_blocks` blocks are imported or no peer has more.

        Raises only CancelledError.
        """
        for peer in peers:
            try:
                for chain in await self._chains(peer):
                    if self._num_warmed >= self._config.transfer.warm_blocks:
                        return
                    num_blocks = await self._adopt(peer, chain)
                    self._num_warmed += num_blocks
                    self._metrics.blocks_warmed.inc(num_blocks)
            except Exception as error:
                expected = isinstance(error, (TandemError, TimeoutError, grpc.aio.AioRpcError))
                told = None if expected else error
                log.warning(
                    "copying cached KV blocks from %s to this new worker failed; the worker "
                    "goes on without the rest of these blocks: %r",
                    peer.worker_id,
                    error,
                    exc_info=told,
                )

    def _waiting(self, sequence_id: str) -> asyncio.Future[Reserved] | None:
        future = self._reserved.pop(sequence_id, None)
        return future if future is not None and not future.done() else None

    async def _chains(self, peer: Peer) -> list[list[bytes]]:
        request = pb.ListChainsRequest(
            blocks_max=self._config.transfer.warm_blocks - self._num_warmed
        )
        response: pb.ListChainsResponse = await peer.stub.ListChains(
            request, timeout=ANSWER_DEADLINE_S, metadata=token_metadata(self._config.cluster.token)
        )
        return [list(chain.block_hashes) for chain in response.chains]

    async def _adopt(self, peer: Peer, block_hashes: list[bytes]) -> int:
        """Imports a chain from a peer; returns the number of imported blocks."""
        sequence_id = f"warm-{uuid.uuid4().hex}"
        future: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._reserved[sequence_id] = future
        try:
            async with asyncio.timeout(CHAIN_DEADLINE_S):
                self._link.send(ImportBlocks(sequence_id, block_hashes))
                reserved = await future
                num_cached = reserved.num_cached_tokens // self._config.engine.block_size
                if not reserved.block_ids:
                    return 0
                num_blocks = await self._prefixes.pull(
                    peer,
                    sequence_id,
                    block_hashes[: num_cached + len(reserved.block_ids)],
                    num_cached=num_cached,
                    targets=reserved.block_ids,
                )
            self._link.send(CommitImport(sequence_id, num_blocks))
            return num_blocks - num_cached
        finally:
            self._reserved.pop(sequence_id, None)
            self._link.send(Remove(sequence_id))  # has no effect after a commit
