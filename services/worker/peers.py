"""The prefill workers that this worker can read from, and how it reads from each.

    (found in the registry) --> connecting --> connected (nixl or grpc) --> gone
                                          `--> refused (or unreachable): tried again later

A peer is one *process* (worker id and epoch): a restarted worker is another peer, and the stale one
is disconnected. Connecting happens beside the requests, not on their path: contract checked, NIXL
metadata fetched, a self-test read made. Which transport a pair uses is logged once and kept in
`transports`, for records and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import msgspec

from services.config import WorkerConfig
from services.errors import Incompatible, TandemError, WorkerLost
from services.registry import Contract, WorkerRecord
from services.rpc.auth import token_metadata
from services.rpc.options import CHANNEL_OPTIONS
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from services.transfer.protocol import RemotePool
from services.worker.convert import contract_from, contract_message
from services.worker.engine_link import EngineLink
from services.worker.messages import DisconnectPeer

log = logging.getLogger(__name__)

_RETRY_S = 5.0


@dataclass(slots=True)
class Peer:
    """A connected source."""

    worker_id: str
    epoch: str
    stub: WorkerStub
    channel: grpc.aio.Channel
    transport: str = ""  # "nixl" or "grpc"

    @property
    def peer_id(self) -> str:
        return _peer_id(self.worker_id, self.epoch)


@dataclass(slots=True)
class _Entry:
    record: tuple[str, str, str]  # worker id, epoch, address
    connecting: asyncio.Task[Peer]
    failed_at: float = 0.0
    seen_at: float = field(default_factory=time.monotonic)  # in the registry, or by a request


class Peers:
    """Keeps a connection to each source. `get` answers from what stands, or waits a bound."""

    def __init__(self, config: WorkerConfig, epoch: str, link: EngineLink) -> None:
        self._config = config
        self._epoch = epoch
        self._link = link
        self._entries: dict[str, _Entry] = {}  # by peer id: a worker id and an epoch
        self.contract: Contract | None = None

    @property
    def transports(self) -> dict[str, str]:
        """Peer worker id -> transport, for each pair that is connected."""
        return {
            entry.record[0]: entry.connecting.result().transport
            for entry in list(self._entries.values())
            if _succeeded(entry.connecting)
        }

    async def get(self, worker_id: str, epoch: str, address: str) -> Peer:
        """A connected peer. Raises TandemError when it cannot be had in `connect_deadline_s`."""
        entry = self._entries.get(_peer_id(worker_id, epoch))
        if entry is None:
            entry = self._open(worker_id, epoch, address)
        try:
            async with asyncio.timeout(self._config.transfer.connect_deadline_s):
                return await asyncio.shield(entry.connecting)
        except TimeoutError:
            raise WorkerLost(f"no connection to {worker_id} yet") from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise WorkerLost(f"{worker_id} went while it was connected") from None

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Connects to sources that are new and forgets those that are gone for long.

        One that is merely missing is kept for a time to live: a Redis that was restarted empty
        lacks records of workers that are well.
        """
        now = time.monotonic()
        for record in records:
            peer_id = _peer_id(record.worker_id, record.epoch)
            if (entry := self._entries.get(peer_id)) is not None:
                entry.seen_at = now
            wanted = record.role == "prefill" and record.state == "ready"
            if not wanted or record.worker_id == self._config.worker_id:
                continue
            if entry is None or self._may_retry(entry):
                self._open(record.worker_id, record.epoch, record.address)
        for peer_id, entry in list(self._entries.items()):
            if now - entry.seen_at > self._config.cluster.record_ttl_s:
                self._close(peer_id)

    async def aclose(self) -> None:
        for peer_id in list(self._entries):
            self._close(peer_id)

    def _may_retry(self, entry: _Entry) -> bool:
        failed = entry.connecting.done() and not _succeeded(entry.connecting)
        return failed and time.monotonic() - entry.failed_at > _RETRY_S

    def _open(self, worker_id: str, epoch: str, address: str) -> _Entry:
        peer_id = _peer_id(worker_id, epoch)
        self._close(peer_id)
        connecting = asyncio.create_task(self._connect(worker_id, epoch, address))
        entry = _Entry((worker_id, epoch, address), connecting)
        connecting.add_done_callback(lambda task: self._opened(entry, task))
        self._entries[peer_id] = entry
        return entry

    def _opened(self, entry: _Entry, task: asyncio.Task[Peer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            entry.failed_at = time.monotonic()
            log.warning("cannot read from %s at %s: %s", entry.record[0], entry.record[2], error)

    def _close(self, peer_id: str) -> None:
        entry = self._entries.pop(peer_id, None)
        if entry is None:
            return
        if _succeeded(entry.connecting):
            self._link.send(DisconnectPeer(peer_id))
            channel = entry.connecting.result().channel
            closing = asyncio.ensure_future(channel.close(None))
            closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            entry.connecting.cancel()

    async def _connect(self, worker_id: str, epoch: str, address: str) -> Peer:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        peer = Peer(worker_id, epoch, WorkerStub(channel), channel)  # type: ignore[no-untyped-call]
        try:
            response = await self._introduce(peer)
            peer.transport = await self._agree(peer, response)
        except BaseException:
            self._link.send(DisconnectPeer(peer.peer_id))
            await channel.close(None)
            raise
        log.info("blocks of %s (epoch %s) come over %s", worker_id, epoch, peer.transport)
        return peer

    async def _introduce(self, peer: Peer) -> pb.ConnectResponse:
        assert self.contract is not None
        request = pb.ConnectRequest(
            worker_id=self._config.worker_id,
            epoch=self._epoch,
            contract=contract_message(self.contract),
            transports=self._wanted(),
        )
        try:
            response: pb.ConnectResponse = await peer.stub.Connect(
                request,
                timeout=self._config.transfer.connect_deadline_s,
                metadata=token_metadata(self._config.cluster.token),
                wait_for_ready=False,
            )
        except grpc.aio.AioRpcError as error:
            raise WorkerLost(f"{error.code().name}: {error.details()}") from None
        if response.epoch != peer.epoch:
            raise WorkerLost(f"it is another process now (epoch {response.epoch})")
        if differences := self.contract.differences(contract_from(response.contract)):
            raise Incompatible("; ".join(differences))
        return response

    def _wanted(self) -> list[str]:
        transport = self._config.transfer.transport
        return ["nixl", "grpc"] if transport == "auto" else [transport]

    async def _agree(self, peer: Peer, response: pb.ConnectResponse) -> str:
        """The best transport that both sides have and that a self-test read has shown to work."""
        common = [t for t in self._wanted() if t in response.transports]
        if "nixl" in common:
            pool = msgspec.msgpack.decode(response.pool, type=RemotePool)
            try:
                await self._link.connect_peer(peer.peer_id, response.nixl_metadata, pool)
                return "nixl"
            except (TandemError, TimeoutError) as error:
                if "grpc" not in common:
                    raise
                log.warning(
                    "NIXL to %s does not work (%s): its blocks come over gRPC, which is slower",
                    peer.worker_id,
                    error,
                )
        if "grpc" not in common:
            offered = ", ".join(response.transports)
            raise Incompatible(f"no common transport: wanted {self._wanted()}, it offers {offered}")
        if "nixl" in self._wanted() and "nixl" not in response.transports:
            log.warning("%s has no NIXL: its blocks come over gRPC, slower", peer.worker_id)
        return "grpc"


def _peer_id(worker_id: str, epoch: str) -> str:
    return f"{worker_id}-{epoch}"


def _succeeded(task: asyncio.Task[Peer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
