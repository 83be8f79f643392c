"""A scripted prefill worker on real gRPC, and recorded engine answers for the consumer under test.

The consumer (DecodeService, ConsumerLease) is real. Its engine process is replaced by a recorder of
commands that settles pulls, because the tests are about a producer that misbehaves at a chosen
moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tandem.common.block_hash import HASH_VERSION
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.sampling_params import SamplingParams
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.types import Mode, Reserved, SequenceSpec
from tandem.net.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from tandem.net.store.registry import KvCompatibility
from tandem.transfer.engine_transport import EngineTransport
from tandem.transfer.grpc.reservations import Reservations
from tandem.transfer.protocol import BlockPull
from tandem.transfer.reads.messages import PeerRank, PullResult
from tandem.worker.decode.prompt_prefill import Producers
from tandem.worker.decode.service import DecodeService
from tandem.worker.engine_process.messages import Add, Command, DisconnectPeer, Remove
from tandem.worker.kv_pulls.lease import ConsumerLease, LeaseMaker
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_choice import PrefixPlan
from tandem.worker.prefill.prefix_pull import PrefixPuller
from tandem.worker.transit import Transit

PROMPT = list(range(100))  # 7 blocks of 16 tokens
PREFIX_BLOCKS = 6  # the complete blocks; the last token is always computed
BLOCK_BYTES = 64
CONFIG = WorkerConfig(
    role="decode",
    cluster=ClusterConfig("c", "redis://", "token"),
    engine=EngineConfig(model="m"),
    transfer=TransferConfig(
        prefill_at="remote",
        heartbeat_interval_s=0.1,
        heartbeat_timeout_s=2.0,  # a busy machine may pause for longer than a fast test would allow
        release_deadline_s=2.0,
    ),
    worker_id="d0",
)
COMPATIBILITY = KvCompatibility(
    model_fingerprint="m",
    compute_dtype="float32",
    numerics="invariant",
    block_size=CONFIG.engine.block_size,
    kv_dtype="float32",
    layout="l",
    hash_version=HASH_VERSION,
)
HOLDER = pb.PrefixHolder(worker_id="p0", epoch="e", address="x", num_blocks=PREFIX_BLOCKS)
Script = Callable[[AsyncIterator[pb.PrefillCommand], Any], AsyncIterator[pb.PrefillEvent]]


def accepted() -> pb.PrefillEvent:
    return pb.PrefillEvent(accepted=pb.Accepted(epoch="e"))


def run(first_block: int, *block_ids: int) -> pb.PrefillEvent:
    return pb.PrefillEvent(run=pb.BlockRun(first_block=first_block, block_ids=block_ids))


def prefilled(token_id: int = 5) -> pb.PrefillEvent:
    return pb.PrefillEvent(prefilled=pb.Prefilled(first_token_id=token_id))


class ScriptedSource(WorkerServicer):
    """Counts the open streams. `script` sends the events after `start`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_open = 0
        self.num_streams = 0

    async def Prefill(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        self.num_open += 1
        self.num_streams += 1
        try:
            async for event in self._script(request_iterator, context):
                yield event
        finally:
            self.num_open -= 1


@dataclass
class RecordingLink:
    """Settles each pull as DONE after `pull_s`; pulls of removed sequences are refused, as in the
    real link."""

    pull_s: float = 0.0
    sent: list[Command] = field(default_factory=list)
    pulls: list[BlockPull] = field(default_factory=list)
    reservations: Reservations = field(default_factory=Reservations)

    @property
    def num_sent(self) -> int:
        return len(self.sent)

    def send(self, command: Command, data: bytes | None = None) -> None:
        self.sent.append(command)

    def pull(self, peer_id: str, pull: BlockPull, transport: str) -> asyncio.Future[PullResult]:
        self.pulls.append(pull)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PullResult] = loop.create_future()
        known = not any(
            isinstance(c, Remove) and c.sequence_id == pull.sequence_id for c in self.sent
        )
        result = PullResult("", done=known, error="" if known else "it is gone")
        loop.call_later(self.pull_s, lambda: future.done() or future.set_result(result))
        return future

    async def connect_peer(
        self, peer_id: str, ranks: Sequence[PeerRank], transport: str
    ) -> list[tuple[int, float]]:
        return []

    def disconnect_peer(self, peer_id: str, transport: str) -> None:
        self.sent.append(DisconnectPeer(peer_id, transport))

    def names(self) -> list[str]:
        return [type(c).__name__ for c in self.sent if not isinstance(c, Add)]


class RecordingStream:
    def __init__(self) -> None:
        self.sequence_ids: set[str] = set()
        self.updates: list[pb.SequenceUpdate] = []
        self.transit = Transit()

    def push(self, update: pb.SequenceUpdate) -> None:
        self.updates.append(update)


@dataclass
class AllPeers:
    """Reports all peers as connected."""

    peers: list[Peer]

    async def get(self, worker_id: str, epoch: str, address: str) -> Peer:
        return next(peer for peer in self.peers if peer.worker_id == worker_id)

    def get_now(self, worker_id: str, epoch: str, address: str) -> Peer | None:
        return next(peer for peer in self.peers if peer.worker_id == worker_id)


@dataclass
class Consumer:
    """A DecodeService whose only prefill worker is the scripted producer."""

    service: DecodeService
    link: RecordingLink
    stream: RecordingStream
    producer: ScriptedSource
    server: grpc.aio.Server
    channel: grpc.aio.Channel
    metrics: WorkerMetrics

    def submit(self, request_id: str = "r", *, has_holder: bool = False) -> asyncio.Task[None]:
        """Submits a request whose blocks are reserved immediately. Returns its prefill task. With
        `has_holder` the producer has the first blocks of the prompt."""
        message = pb.SubmitSequence(
            request_id=request_id,
            attempt=1,
            input=pb.SequenceInput(token_ids=PROMPT, num_prompt_tokens=len(PROMPT), max_tokens=10),
            prefill_candidates=[
                pb.PrefillCandidate(
                    worker_id="p0",
                    epoch="e",
                    address="x",
                    cached_blocks=PREFIX_BLOCKS if has_holder else 0,
                )
            ],
            prefix_holders=[HOLDER] if has_holder else [],
        )
        return self._submit(message)

    def submit_here(self, request_id: str = "r") -> asyncio.Task[None]:
        """Submits a request without prefill candidates; the producer may have the first blocks of
        its prompt."""
        message = pb.SubmitSequence(
            request_id=request_id,
            attempt=1,
            input=pb.SequenceInput(token_ids=PROMPT, num_prompt_tokens=len(PROMPT), max_tokens=10),
            prefix_holders=[HOLDER],
        )
        return self._submit(message)

    def cancel(self, request_id: str = "r") -> None:
        self.service._sequences.remove(f"{request_id}#1")

    @property
    def num_prefilling(self) -> int:
        """Counts the tasks that obtain the KV of a prompt."""
        return sum(s.prefilling is not None for s in self.service._sequences)

    def _submit(self, message: pb.SubmitSequence) -> asyncio.Task[None]:
        sequence_id = f"{message.request_id}#1"
        self.service._submit(self.stream, message)  # type: ignore[arg-type]
        self.service._on_reserved(Reserved(sequence_id, 0, list(range(7))))
        sequence = self.service._sequences.get(sequence_id)
        assert sequence is not None
        assert sequence.prefilling is not None
        return sequence.prefilling


@dataclass
class PrefixConsumer:
    """A PrefixPuller whose holders are the scripted producers p0, p1 and so on."""

    puller: PrefixPuller
    link: RecordingLink
    metrics: WorkerMetrics
    peers: list[Peer]
    producers: list[ScriptedSource]

    def plan(
        self,
        *,
        num_blocks: int = PREFIX_BLOCKS,
        prompt: list[int] = PROMPT,
        load_s: float = 0.0,
    ) -> PrefixPlan | None:
        holders = [
            pb.PrefixHolder(
                worker_id=f"p{n}", epoch="e", address="x", num_blocks=num_blocks, load_s=load_s
            )
            for n in range(len(self.producers))
        ]
        spec = SequenceSpec(
            "s", prompt, len(prompt), Mode.PREFILL_ONLY, SamplingParams(temperature=0, max_tokens=1)
        )
        return self.puller.plan(spec, holders)

    async def fill(self, *, num_cached: int = 0) -> int:
        """Pulls the prefix of a sequence with blocks 0 to 6, of which the first `num_cached` are
        cached."""
        plan = self.plan()
        assert plan is not None
        reserved = Reserved("s", num_cached * 16, list(range(num_cached, 7)))
        return await self.puller.fill(plan, reserved)

    def pulled(self) -> float:
        """The value of the metric `tandem_prefix_blocks_pulled_total`."""
        samples = [s for family in self.metrics.collect() for s in family.samples]
        return sum(s.value for s in samples if s.name == "tandem_prefix_blocks_pulled_total")


@asynccontextmanager
async def consumer_of(
    script: Script, *, pull_s: float = 0.0, config: WorkerConfig = CONFIG
) -> AsyncIterator[Consumer]:
    link = RecordingLink(pull_s)
    async with _serving(link, script) as (peer, producer, server):
        peers = AllPeers([peer])
        metrics, rates, make_lease, prefixes = _parts(link, peers, config)
        parts = WorkerParts(config, link, rates, metrics)  # type: ignore[arg-type]
        producers = Producers(peers, prefixes, make_lease)  # type: ignore[arg-type]
        identity = pb.PrefixHolder(worker_id="d0", epoch="e", address="here")
        service = DecodeService(parts, producers, identity, max_model_len=1000)
        stream = RecordingStream()
        yield Consumer(service, link, stream, producer, server, peer.channel, metrics)


@asynccontextmanager
async def prefix_consumer_of(
    *scripts: Script, pull_s: float = 0.0, compatibility: KvCompatibility = COMPATIBILITY
) -> AsyncIterator[PrefixConsumer]:
    link = RecordingLink(pull_s)
    async with AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(_serving(link, script, f"p{number}"))
            for number, script in enumerate(scripts)
        ]
        peers = [peer for peer, _, _ in served]
        metrics, _, _, prefixes = _parts(link, AllPeers(peers), compatibility=compatibility)
        yield PrefixConsumer(
            prefixes, link, metrics, peers, [producer for _, producer, _ in served]
        )


@asynccontextmanager
async def _serving(
    link: RecordingLink, script: Script, worker_id: str = "p0"
) -> AsyncIterator[tuple[Peer, ScriptedSource, grpc.aio.Server]]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    producer = ScriptedSource(script)
    add_WorkerServicer_to_server(producer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    try:
        transports = {"nixl": EngineTransport("nixl", f"{worker_id}-e", link)}
        yield (
            Peer(worker_id, "e", WorkerStub(channel), channel, transports, "nixl"),
            producer,
            server,
        )
    finally:
        await channel.close(None)
        await server.stop(None)


def _parts(
    link: RecordingLink,
    peers: AllPeers,
    config: WorkerConfig = CONFIG,
    compatibility: KvCompatibility = COMPATIBILITY,
) -> tuple[WorkerMetrics, Rates, LeaseMaker, PrefixPuller]:
    """Creates the parts that all leases of a consumer share. All but the engine are real."""
    metrics = WorkerMetrics(worker_id="d0", role="decode")
    rates = Rates(config, WorkerRates(block_bytes=BLOCK_BYTES))
    engine: Any = link
    puller = Puller(config.transfer, engine, spans=BlockSpans.equal(BLOCK_BYTES, 1 << 20))
    make_lease = partial(ConsumerLease, puller=puller, rates=rates, config=config)
    known: Any = peers
    prefixes = PrefixPuller(config, compatibility, known, rates, metrics, make_lease)
    return metrics, rates, make_lease, prefixes
