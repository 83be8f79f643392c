"""Reads a peer's blocks over NIXL or CUDA IPC, in the transfer thread of the engine process."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Literal, Protocol

import msgspec

from tandem.errors import LeaseLost, WorkerLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.protocol import BlockPull
from tandem.transfer.reads.messages import PeerRank, PullResult, RemotePool

EngineTransportName = Literal["nixl", "cuda_ipc"]

_ENGINE_MARGIN_S = 5.0


class ReadingEngine(Protocol):
    """The I/O process's connection to the engine process, with only the methods that control the
    engine's transfer thread."""

    async def connect_peer(
        self, peer_id: str, ranks: Sequence[PeerRank], transport: str
    ) -> list[tuple[int, float]]:
        """Connects a peer, whose ranks are given in order, and tests the connection. Returns
        (bytes, seconds) of a few test reads.

        Raises TandemError if the peer cannot be read.
        """

    def disconnect_peer(self, peer_id: str, transport: str) -> None:
        """Makes the engine forget the peer. Unfinished pulls from the peer fail."""

    def pull(self, peer_id: str, pull: BlockPull, transport: str) -> Awaitable[PullResult]:
        """Starts a pull. Returns an awaitable of the result.

        If the sequence of the pull releases the local blocks, the engine gives up the pull. The
        engine does not reuse a block that a read may still write.
        """


class EngineTransport:
    """A transport whose reads run in the transfer thread of the engine process (thread.py)."""

    def __init__(self, name: EngineTransportName, peer_id: str, engine: ReadingEngine) -> None:
        self.name = name
        self._peer_id = peer_id
        self._engine = engine

    async def connect(self, offer: pb.ConnectResponse) -> list[tuple[int, float]]:
        rows: Sequence[pb.ConnectResponse | pb.RankPool] = (offer, *offer.other_ranks)
        ranks = [
            PeerRank(
                rank.nixl_metadata if self.name == "nixl" else rank.cuda_ipc_metadata,
                msgspec.msgpack.decode(rank.pool, type=RemotePool),
            )
            for rank in rows
        ]
        try:
            return await self._engine.connect_peer(self._peer_id, ranks, self.name)
        except TimeoutError as error:
            raise WorkerLost(str(error) or "the engine did not answer in time") from None

    async def pull(self, pull: BlockPull) -> float:
        # Normally the transfer thread enforces the deadline. This later timeout is for an engine
        # that hangs.
        try:
            async with asyncio.timeout(pull.deadline_s + _ENGINE_MARGIN_S):
                result = await self._engine.pull(self._peer_id, pull, self.name)
        except TimeoutError:
            raise LeaseLost(
                f"a read from {self._peer_id} did not end in time, because this worker's engine "
                "hangs"
            ) from None
        if not result.done:
            raise LeaseLost(f"reading KV blocks from {self._peer_id} failed: {result.error}")
        return result.elapsed_s

    def close(self) -> None:
        self._engine.disconnect_peer(self._peer_id, self.name)
