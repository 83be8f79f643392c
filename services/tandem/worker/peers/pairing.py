"""Makes a pair of this worker and a source: introduced, compared, measured, a transport chosen.

    Connect: contracts, hosts, NIXL metadata --> NIXL reads, gRPC bytes, timed --> transport

All of it beside the requests, never on their path. `again` measures a pair anew whose transport
failed or fell behind; what is chosen and why is logged once, loudly when it is not the best.
"""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import msgspec

from tandem.config import WorkerConfig
from tandem.errors import Incompatible, LeaseLost, TandemError, WorkerLost
from tandem.rpc.auth import token_metadata
from tandem.rpc.options import CHANNEL_OPTIONS
from tandem.rpc.tandem.v1 import worker_pb2 as pb
from tandem.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.store.registry import Contract
from tandem.transfer.protocol import PROBE_BYTES, RemotePool
from tandem.transfer.reach import Reach, host_identity, reach
from tandem.worker.convert import contract_from, contract_message, host_from, host_message
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import DisconnectPeer
from tandem.worker.peers.bulk_channels import BulkChannels, probe_grpc
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tandem.worker.peers.transport_choice import Choice, Way, choose_transport, figures

log = logging.getLogger(__name__)

# Sizes of the gRPC probes. The first one opens the connection, too, and is not measured.
_GRPC_PROBES = (1, 1, 256 << 10, PROBE_BYTES, PROBE_BYTES)
_SLOW_PROBE_S = 0.2  # after one that took longer no larger one is made


class Pairing:
    def __init__(
        self, config: WorkerConfig, epoch: str, link: EngineLink, rates: Rates, contract: Contract
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._link = link
        self._rates = rates
        self._contract = contract
        self._host = host_identity(config.transfer.nixl_tcp)

    async def make(self, worker_id: str, epoch: str, address: str) -> Peer:
        """Raises TandemError when no transport reaches it."""
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
        peer = Peer(worker_id, epoch, stub, channel, BulkChannels(address))
        try:
            await self.again(peer)
        except BaseException:
            self._link.send(DisconnectPeer(peer.peer_id))
            peer.bulk.close()
            await channel.close(None)
            raise
        return peer

    async def again(self, peer: Peer) -> None:
        """Measures the pair and sets its transport. Raises TandemError when nothing reaches it."""
        response = await self._introduce(peer)
        offered = set(response.transports)
        peer.offers_grpc = "grpc" in offered
        wanted = self._config.transfer.transport
        if wanted not in offered and not (wanted == "auto" and offered):
            raise Incompatible(f"no common transport: wanted {wanted}, it offers {sorted(offered)}")
        if wanted == "auto" and "grpc" not in offered:
            wanted = "nixl"
        how = reach(self._host, host_from(response.host)) if response.HasField("host") else None
        by_grpc = await self._probe_grpc(peer) if wanted != "nixl" else Way()
        by_nixl = Way()
        if "nixl" not in offered:
            by_nixl = Way(error="the source has none, or may not use it")
        elif how is Reach.NOTHING:
            by_nixl = Way(error=how.value)
        elif wanted != "grpc":
            by_nixl = await self._probe_nixl(peer, response)
        if wanted == "nixl" and by_nixl.error:
            raise WorkerLost(by_nixl.error)
        self.use(peer, choose_transport(wanted, by_nixl, by_grpc, how))

    def use(self, peer: Peer, choice: Choice) -> None:
        """From now on; `again` may bring another transport back."""
        told = (peer.transport, peer.reason)
        peer.transport, peer.reason = choice.transport, choice.reason
        self._rates.use(peer.worker_id, choice.transport)
        if told == (choice.transport, choice.reason):
            return
        rate = figures(Way(self._rates.pair(peer.worker_id)))
        if choice.warning:
            log.warning(
                "blocks of %s come over %s: %s", peer.peer_id, choice.transport, choice.warning
            )
        else:
            log.info("blocks of %s come over %s (%s)", peer.peer_id, choice.transport, rate)

    async def _introduce(self, peer: Peer) -> pb.ConnectResponse:
        wanted = self._config.transfer.transport
        request = pb.ConnectRequest(
            worker_id=self._config.worker_id,
            epoch=self._epoch,
            contract=contract_message(self._contract),
            transports=["nixl", "grpc"] if wanted == "auto" else [wanted],
            host=host_message(self._host),
        )
        try:
            response: pb.ConnectResponse = await peer.stub.Connect(
                request,
                timeout=self._config.transfer.connect_deadline_s,
                metadata=token_metadata(self._config.cluster.token),
                wait_for_ready=False,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise Incompatible(error.details() or "") from None
            raise WorkerLost(f"{error.code().name}: {error.details()}") from None
        if response.epoch != peer.epoch:
            raise WorkerLost(f"it is another process now (epoch {response.epoch})")
        if differences := self._contract.differences(contract_from(response.contract)):
            raise Incompatible("; ".join(differences))
        return response

    async def _probe_nixl(self, peer: Peer, response: pb.ConnectResponse) -> Way:
        pool = msgspec.msgpack.decode(response.pool, type=RemotePool)
        try:
            reads = await self._link.connect_peer(peer.peer_id, response.nixl_metadata, pool)
        except (TandemError, TimeoutError) as error:
            return Way(error=str(error) or "no answer in time")
        return self._measured(peer, "nixl", reads)

    async def _probe_grpc(self, peer: Peer) -> Way:
        """A pair whose probe fails keeps gRPC: it was introduced over it, after all."""
        took: list[tuple[int, float]] = []
        try:
            for num_bytes in _GRPC_PROBES:
                seconds = await probe_grpc(
                    peer.bulk,
                    num_bytes,
                    token=self._config.cluster.token,
                    deadline_s=self._config.transfer.connect_deadline_s,
                )
                took.append((num_bytes, seconds))
                if seconds > _SLOW_PROBE_S:
                    break
        except LeaseLost as error:
            log.info("no more gRPC probes of %s: %s", peer.worker_id, error)
        return self._measured(peer, "grpc", took[1:])

    def _measured(self, peer: Peer, transport: str, reads: list[tuple[int, float]]) -> Way:
        self._rates.on_probe(peer.worker_id, transport, reads)
        return Way(self._rates.pair(peer.worker_id, transport))
