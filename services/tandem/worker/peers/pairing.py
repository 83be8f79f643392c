"""Connects this worker with a producer and chooses the transport between the two.

A pair is this worker and one producer, another worker from which this worker pulls blocks.

    1. The call `Connect` exchanges the KV formats, the hosts' identities and the NIXL metadata.
    2. Test reads over each common transport (CUDA IPC, NIXL and gRPC) are timed.
    3. The transport is chosen by these times (transport_choice.py).

Pairing runs in the background, never on a request's path. If a transport fails or becomes slow
later, `again` repeats these steps.

The choice and its reason are logged once for each pair, as a warning if the transport is not the
best one. If the network is the reason, only the first pair logs a warning, because the reason is
the same for all pairs.
"""

import logging

import grpc.aio
import msgspec

from tandem.common.config.worker import WorkerConfig
from tandem.errors import Incompatible, TandemError, WorkerLost
from tandem.net.rpc.convert import to_message, to_struct
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.net.store.registry import KvCompatibility
from tandem.transfer.engine_transport import EngineTransport
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.transfer.nixl.reach import HostIdentity, Reach, host_identity, may_map_gpu, reach
from tandem.transfer.protocol import Transport
from tandem.transfer.reads.messages import RemotePool
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.peers.peer import Peer, peer_id
from tandem.worker.peers.rates import Rates
from tandem.worker.peers.transport_choice import (
    NAMES,
    TransportChoice,
    Way,
    choose_transport,
    figures,
    is_slower,
)

log = logging.getLogger(__name__)

_OF_THE_NETWORK = {"tcp", "unreachable", "gpu"}
_REASON_MAX = 300  # a reason is cut to this many characters
FAILURES_MAX = 3  # After this many failed reads in a row, the pair uses gRPC


class Pairing:
    def __init__(
        self,
        config: WorkerConfig,
        epoch: str,
        link: EngineLink,
        rates: Rates,
        compatibility: KvCompatibility,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._link = link
        self._rates = rates
        self._compatibility = compatibility
        self._calls = PeerCalls(config.cluster.cluster_id, config.cluster.token, config.tls_dir)
        self._host = host_identity(config.transfer.nixl_tcp)
        # reasons in `_OF_THE_NETWORK` about which a warning was already logged for some pair
        self._warned: set[str] = set()

    async def make(self, worker_id: str, epoch: str, address: str) -> Peer:
        """Connects to a peer. Raises TandemError if no transport works."""
        channel = self._calls.open(address)
        stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
        process_id = peer_id(worker_id, epoch)
        transports: tuple[Transport, ...] = (
            EngineTransport("cuda_ipc", process_id, self._link),
            EngineTransport("nixl", process_id, self._link),
            GrpcTransport(worker_id, address, self._link, self._config.transfer, self._calls),
        )
        peer = Peer(worker_id, epoch, stub, channel, {each.name: each for each in transports})
        try:
            await self.again(peer)
        except BaseException:
            peer.close()
            raise
        return peer

    async def again(self, peer: Peer) -> None:
        """Measures the pair and sets its transport. Raises TandemError if no transport works."""
        response = await self._introduce(peer)
        offered = set(response.transports)
        peer.offers_grpc = "grpc" in offered
        wanted = self._config.transfer.transport
        if wanted not in offered and not (wanted == "auto" and offered):
            raise Incompatible(
                f"there is no common transport: this worker has --transport {wanted}, and "
                f"{peer.worker_id} offers {', '.join(sorted(offered)) or 'none'}; set --transport "
                "auto on both"
            )
        if wanted == "auto" and "grpc" not in offered:
            wanted = "nixl" if "nixl" in offered else "cuda_ipc"
        how = None
        if response.HasField("host"):
            theirs = to_struct(HostIdentity, response.host)
            how = reach(self._host, theirs, _memory_of(response))
            if not may_map_gpu(self._host, theirs):
                offered.discard("cuda_ipc")
        if by_grpc_only := how in (Reach.NOTHING, Reach.HIDDEN_GPU):
            offered.discard("nixl")
        common = offered if wanted == "auto" else offered & {wanted}
        if not common:
            hidden = "this process does not see the peer's GPU, as CUDA IPC requires"
            raise WorkerLost(how.value if how and wanted == "nixl" else hidden)
        # gRPC is measured first, because it always works.
        ways = {
            name: await self._measure(peer, name, response)
            for name in reversed(NAMES)
            if name in common
        }
        if wanted != "auto" and (error := ways[wanted].error):
            raise WorkerLost(error)
        if not by_grpc_only and set(response.transports) == {"grpc"} and wanted == "auto":
            ways["nixl"] = Way(error="the producer does not offer NIXL")
        self.use(peer, choose_transport(wanted, ways, how))

    def use(self, peer: Peer, choice: TransportChoice) -> None:
        """Sets the pair's transport, and logs if the transport has changed."""
        previous = (peer.transport, peer.reason)
        peer.transport = choice.transport
        peer.reason = choice.reason
        self._rates.use(peer.worker_id, choice.transport, choice.warning[:_REASON_MAX])
        if previous == (choice.transport, choice.reason):
            return
        rate = figures(Way(self._rates.pair(peer.worker_id)))
        if choice.warning and choice.reason not in self._warned:
            self._warned.update({choice.reason} & _OF_THE_NETWORK)
            log.warning(
                "KV blocks of peer %s are pulled over %s: %s",
                peer.peer_id,
                choice.transport,
                choice.warning,
            )
        else:
            why = f"{choice.reason}, {rate}" if choice.reason else rate
            log.info(
                "KV blocks of peer %s are pulled over %s (%s)",
                peer.peer_id,
                choice.transport,
                why,
            )

    def give_up_failing(self, peer: Peer) -> None:
        """Switches a pair to gRPC after several reads over another transport in a row have
        failed."""
        failures = self._rates.failures(peer.worker_id, peer.transport)
        may = self._config.transfer.transport == "auto" and peer.offers_grpc
        if peer.transport != "grpc" and failures >= FAILURES_MAX and may:
            name = NAMES[peer.transport]
            why = (
                f"{failures} {name} reads failed in a row; {name} is measured again from time to "
                "time"
            )
            self.use(peer, TransportChoice("grpc", "broken", why))

    def is_doubtful(self, peer: Peer) -> bool:
        """Returns whether another measurement may change the pair's transport."""
        if self._config.transfer.transport != "auto":
            return False
        if peer.reason in ("slow", "broken"):
            return True
        by_grpc = self._rates.pair(peer.worker_id, "grpc")
        return is_slower(self._rates.pair(peer.worker_id, peer.transport), by_grpc)

    async def _introduce(self, peer: Peer) -> pb.ConnectResponse:
        wanted = self._config.transfer.transport
        request = pb.ConnectRequest(
            worker_id=self._config.worker_id,
            epoch=self._epoch,
            compatibility=to_message(pb.KvCompatibility, self._compatibility),
            transports=list(NAMES) if wanted == "auto" else [wanted],
            host=to_message(pb.HostIdentity, self._host),
        )
        try:
            response: pb.ConnectResponse = await peer.stub.Connect(
                request,
                timeout=self._config.transfer.connect_deadline_s,
                metadata=self._calls.metadata,
                wait_for_ready=False,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise Incompatible(error.details() or "") from None
            raise WorkerLost(f"{error.code().name}: {error.details()}") from None
        if response.epoch != peer.epoch:
            raise WorkerLost(
                f"worker {peer.worker_id} was replaced: the process at its address now has "
                f"the epoch {response.epoch} instead of {peer.epoch}"
            )
        theirs = to_struct(KvCompatibility, response.compatibility)
        if differences := self._compatibility.differences(theirs):
            raise Incompatible(
                f"this worker cannot read KV blocks of {peer.worker_id}, because they differ: "
                "on this worker, " + "; ".join(differences)
            )
        return response

    async def _measure(self, peer: Peer, transport: str, offer: pb.ConnectResponse) -> Way:
        try:
            reads = await peer.transports[transport].connect(offer)
        except TandemError as error:
            return Way(error=str(error))
        self._rates.on_probe(peer.worker_id, transport, reads)
        return Way(self._rates.pair(peer.worker_id, transport))


def _memory_of(offer: pb.ConnectResponse) -> str:
    """Returns the memory of the peer's pool, "DRAM" or "VRAM"."""
    if not offer.pool:  # the peer does not offer NIXL
        return "DRAM"
    return msgspec.msgpack.decode(offer.pool, type=RemotePool).memory
