"""Pairs over real gRPC: who is connected, by which transport, and when that changes.

The engine's side of NIXL is scripted: `connect_peer` answers with the reads that a test names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc.aio
import msgspec
import pytest

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.rates import WorkerRates
from tandem.errors import Incompatible, WorkerLost
from tandem.net.rpc.options import SERVER_OPTIONS
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.transfer.nixl.reach import host_identity
from tandem.transfer.reads.messages import PeerRank, RemotePool
from tandem.worker.peers import pairing as pairing_module
from tandem.worker.peers import peers as peers_module
from tandem.worker.peers.pairing import FAILURES_MAX, Pairing
from tandem.worker.peers.peers import Peers
from tandem.worker.peers.rates import Rates

pytestmark = pytest.mark.service

COMPATIBILITY = KvCompatibility("m", "float32", "invariant", 16, "float32", "l", 1)
MIB = 1 << 20
FAST = [(1000, 1e-4), (4 * MIB, 1e-3)]
SLOW = [(1000, 1.0), (4 * MIB, 30.0)]


class Producer(WorkerServicer):
    """A worker's answers to `Connect` and `Probe`."""

    def __init__(self) -> None:
        host = host_identity()
        self.answer = pb.ConnectResponse(
            worker_id="p0",
            epoch="e",
            compatibility=pb.KvCompatibility(**msgspec.structs.asdict(COMPATIBILITY)),
            transports=["nixl", "grpc"],
            nixl_metadata=b"m",
            pool=msgspec.msgpack.encode(RemotePool(0, 4, 1000, 0, "DRAM")),
            host=pb.HostIdentity(**msgspec.structs.asdict(host) | {"cma": True, "rdma": False}),
        )
        self.num_connects = self.num_probes = 0

    async def Connect(self, request: pb.ConnectRequest, context: Any) -> pb.ConnectResponse:  # noqa: N802
        assert request.host.boot_id == host_identity().boot_id
        self.num_connects += 1
        return self.answer

    async def Probe(  # noqa: N802
        self, request: pb.ProbeRequest, context: Any
    ) -> AsyncIterator[pb.BlockBytes]:
        self.num_probes += 1
        yield pb.BlockBytes(data=bytes(request.num_bytes))


@dataclass
class Link:
    """Stands in for `tandem.worker.engine_process.link.EngineLink`, as far as peers need it."""

    reads: list[tuple[int, float]] | Exception = field(default_factory=lambda: list(FAST))
    # Transport -> its reads, if they differ from `reads`.
    reads_over: dict[str, list[tuple[int, float]] | Exception] = field(default_factory=dict)
    pool: Any = field(default_factory=lambda: SimpleNamespace(write_probe=lambda data: None))
    num_connected: int = 0
    disconnected: list[str] = field(default_factory=list)

    async def connect_peer(
        self, peer_id: str, ranks: Sequence[PeerRank], transport: str
    ) -> list[tuple[int, float]]:
        self.num_connected += 1
        reads = self.reads_over.get(transport, self.reads)
        if isinstance(reads, Exception):
            raise reads
        return reads

    def disconnect_peer(self, peer_id: str, transport: str) -> None:
        self.disconnected.append(peer_id)


@dataclass
class Pair:
    producer: Producer
    link: Link
    rates: Rates
    peers: Peers
    address: str

    def record(self, worker_id: str = "p0", role: str = "prefill") -> WorkerRecord:
        return WorkerRecord(
            worker_id=worker_id,
            epoch="e",
            role=role,
            state="ready",
            address=self.address,
            metrics_address="",
            host="h",
            pid=1,
            model="m",
            max_model_len=100,
            compatibility=COMPATIBILITY,
        )

    async def get(self) -> Any:
        return await self.peers.get("p0", "e", self.address)

    async def settled(self, transport: str) -> None:
        """Polls the registry until the pair is on this transport."""
        async with asyncio.timeout(10):
            while self.rates.pairs["p0"].transport != transport:
                self.peers.update([self.record()])
                await asyncio.sleep(0.01)


@asynccontextmanager
async def pair_of(transport: str = "auto", **link: Any) -> AsyncIterator[Pair]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    producer = Producer()
    add_WorkerServicer_to_server(producer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = WorkerConfig(
        role="decode",
        cluster=ClusterConfig("c", "redis://", "token"),
        engine=EngineConfig(model="m"),
        transfer=TransferConfig(transport=transport),  # type: ignore[arg-type]
        worker_id="d0",
    )
    engine_link = Link(**link)
    rates = Rates(config, WorkerRates(block_bytes=1000, step_tokens=256))
    pairing = Pairing(config, "e0", engine_link, rates, COMPATIBILITY)  # type: ignore[arg-type]
    peers = Peers(config, rates, pairing)
    try:
        yield Pair(producer, engine_link, rates, peers, f"127.0.0.1:{port}")
    finally:
        await peers.aclose()
        await server.stop(None)


async def test_a_new_pair_measures_both_ways_and_takes_nixl(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair_of() as pair:
        assert (await pair.get()).transport == "nixl"
        by_grpc, by_nixl = pair.rates.pair("p0", "grpc"), pair.rates.pair("p0", "nixl")
        assert by_grpc is not None
        assert by_nixl is not None
        assert by_nixl.seconds(4 * MIB) == pytest.approx(1e-3, rel=0.1)
        assert pair.rates.pairs == {"p0": by_nixl}
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


async def test_slower_nixl_loses_and_the_figures_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_AGAIN_MIN_S", 0.0)
    async with pair_of(reads=SLOW) as pair:
        assert (await pair.get()).transport == "grpc"
        for _ in range(3):  # it is measured again, with the same outcome
            before = pair.link.num_connected
            async with asyncio.timeout(10):
                while pair.link.num_connected == before:
                    pair.peers.update([pair.record()])
                    await asyncio.sleep(0.01)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "are pulled over grpc: NIXL is slower" in warning
    assert "GB/s" in warning


async def test_what_the_network_lacks_is_told_once_for_all_pairs_and_their_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair_of() as pair:
        pair.producer.answer.host.boot_id = "of another machine"
        for worker_id, epoch in (("p0", "e"), ("p1", "e"), ("p0", "e-again")):
            pair.producer.answer.epoch = epoch
            peer = await pair.peers.get(worker_id, epoch, pair.address)
            assert peer.transport == "grpc"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "no common path but plain TCP" in warning


async def test_broken_nixl_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_AGAIN_MIN_S", 0.0)
    async with pair_of(reads=Incompatible("no such endpoint")) as pair:
        assert (await pair.get()).transport == "grpc"
        pair.link.reads = FAST
        await pair.settled("nixl")


async def test_reads_that_fail_in_a_row_turn_the_pair_to_grpc_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair_of() as pair:
        peer = await pair.get()
        for _ in range(FAILURES_MAX - 1):
            pair.rates.on_pull_failed("p0", "nixl")
        assert (await pair.get()).transport == "nixl"
        pair.rates.on_pull_failed("p0", "nixl")
        assert await pair.get() is peer
        assert peer.transport == "grpc"
        assert pair.rates.pairs["p0"].transport == "grpc"
    assert "3 NIXL reads failed in a row" in caplog.text


async def test_pulls_that_became_slower_than_grpc_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_AGAIN_MIN_S", 0.0)
    async with pair_of() as pair:
        assert (await pair.get()).transport == "nixl"
        pair.link.reads = SLOW
        for _ in range(60):
            pair.rates.on_pull("p0", "nixl", 4 * MIB, 30.0)
        await pair.settled("grpc")


async def test_nixl_is_not_tried_where_only_tcp_would_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair_of() as pair:
        pair.producer.answer.host.boot_id = "another machine"
        assert (await pair.get()).transport == "grpc"
        assert pair.link.num_connected == 0
    assert "no common path but plain TCP" in caplog.text


@pytest.mark.parametrize(
    ("gpu", "memory", "transport"),
    [("nvidia0", "VRAM", "grpc"), ("nvidia3", "VRAM", "nixl"), ("nvidia0", "DRAM", "nixl")],
)
async def test_nixl_is_not_tried_on_a_gpu_that_this_container_does_not_have(
    gpu: str,
    memory: str,
    transport: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in two pods of one node, with a GPU each."""
    own = msgspec.structs.replace(host_identity(), gpus=("nvidia3",), cma=True, rdma=False)
    monkeypatch.setattr(pairing_module, "host_identity", lambda _: own)
    async with pair_of() as pair:
        pair.producer.answer.host.gpus[:] = [gpu]
        pair.producer.answer.pool = msgspec.msgpack.encode(RemotePool(0, 4, 1000, 0, memory))
        assert (await pair.get()).transport == transport
        assert pair.link.num_connected == (transport == "nixl")
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == (transport == "grpc")
        assert all("no path to the peer's GPU" in warning for warning in warnings)


async def test_nixl_alone_is_refused_on_a_gpu_that_this_container_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = msgspec.structs.replace(host_identity(), gpus=("nvidia3",), cma=True, rdma=False)
    monkeypatch.setattr(pairing_module, "host_identity", lambda _: own)
    async with pair_of("nixl") as pair:
        pair.producer.answer.host.gpus[:] = ["nvidia0"]
        pair.producer.answer.pool = msgspec.msgpack.encode(RemotePool(0, 4, 1000, 0, "VRAM"))
        with pytest.raises(WorkerLost, match="no path to the peer's GPU"):
            await pair.get()


def offers_cuda_ipc(pair: Pair, gpu: str) -> None:
    pair.producer.answer.transports[:] = ["cuda_ipc", "grpc"]
    pair.producer.answer.cuda_ipc_metadata = b"handle"
    pair.producer.answer.host.gpus[:] = [gpu]
    pair.producer.answer.pool = msgspec.msgpack.encode(RemotePool(0, 4, 1000, 0, "VRAM"))


@pytest.mark.parametrize(
    ("gpu", "reads", "transport", "warning"),
    [
        ("nvidia3", FAST, "cuda_ipc", ""),
        ("nvidia3", SLOW, "grpc", "CUDA IPC is slower"),
        ("nvidia3", Incompatible("no such handle"), "grpc", "CUDA IPC does not work: no such hand"),
        ("nvidia0", FAST, "grpc", "no path to the peer's GPU"),
    ],
)
async def test_gpus_of_one_machine_use_cuda_ipc_if_it_is_as_fast_as_grpc(
    gpu: str,
    reads: list[tuple[int, float]] | Exception,
    transport: str,
    warning: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = msgspec.structs.replace(host_identity(), gpus=("nvidia3",), cma=True, rdma=False)
    monkeypatch.setattr(pairing_module, "host_identity", lambda _: own)
    async with pair_of(reads_over={"cuda_ipc": reads}) as pair:
        offers_cuda_ipc(pair, gpu)
        assert (await pair.get()).transport == transport
        assert pair.link.num_connected == (gpu == "nvidia3")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == bool(warning)
    assert all(warning in each for each in warnings)


async def test_cuda_ipc_that_fails_turns_the_pair_to_grpc_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers_module, "_AGAIN_MIN_S", 0.0)
    async with pair_of() as pair:
        offers_cuda_ipc(pair, "")
        assert (await pair.get()).transport == "cuda_ipc"
        for _ in range(FAILURES_MAX):
            pair.rates.on_pull_failed("p0", "cuda_ipc")
        assert (await pair.get()).transport == "grpc"
        assert "3 CUDA IPC reads failed in a row" in caplog.text
        await pair.settled("cuda_ipc")


async def test_cuda_ipc_alone_is_refused_where_the_peers_gpu_is_not_visible() -> None:
    async with pair_of("cuda_ipc") as pair:
        offers_cuda_ipc(pair, "")
        pair.producer.answer.host.boot_id = "of another machine"
        with pytest.raises(WorkerLost, match="does not see the peer's GPU"):
            await pair.get()


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_what_was_asked_for_is_used_or_nothing(transport: str) -> None:
    async with pair_of(transport, reads=Incompatible("broken")) as pair:
        if transport == "nixl":
            with pytest.raises(WorkerLost, match="broken"):
                await pair.get()
            assert set(pair.link.disconnected) == {"p0-e"}
        else:
            assert (await pair.get()).transport == "grpc"
        assert pair.link.num_connected == (transport == "nixl")


async def test_a_pair_without_a_common_transport_is_refused() -> None:
    async with pair_of("grpc") as pair:
        del pair.producer.answer.transports[1]
        with pytest.raises(Incompatible, match="this worker has --transport grpc, and p0 offers"):
            await pair.get()


async def test_what_cannot_work_is_said_once_and_seldom_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers_module, "_RETRY_S", 0.0)
    async with pair_of("grpc") as pair:
        transports = list(pair.producer.answer.transports)
        del pair.producer.answer.transports[:]
        with pytest.raises(Incompatible):
            await pair.get()
        for _ in range(3):
            pair.peers.update([pair.record()])
            await pair.peers.all_connected()
        assert pair.producer.num_connects == 1
        monkeypatch.setattr(peers_module, "_RETRY_INCOMPATIBLE_S", 0.0)
        pair.peers._entries["p0-e"].retry_s = 0.0
        pair.peers.update([pair.record()])
        await asyncio.wait([pair.peers._entries["p0-e"].connecting])
        assert pair.producer.num_connects == 2
        assert caplog.text.count("cannot read KV blocks from p0") == 1
        assert "p0 offers none" in pair.peers.unreachable["p0"]
        pair.producer.answer.transports.extend(transports)
        pair.peers.update([pair.record()])
        assert [peer.worker_id for peer in await pair.peers.all_connected()] == ["p0"]
        assert pair.peers.unreachable == {}


@pytest.mark.parametrize(("num_decode", "connected"), [(16, True), (17, False)])
async def test_many_decode_peers_are_connected_on_demand_only(
    num_decode: int, connected: bool
) -> None:
    async with pair_of() as pair:
        pair.producer.answer.worker_id = "x0"
        decode = [pair.record(f"x{i}", "decode") for i in range(num_decode)]
        pair.peers.update([*decode, pair.record("d0", "decode")])  # itself does not count
        assert ("x0-e" in pair.peers._entries) is connected
        assert pair.peers.get_now("x0", "e", pair.address) is None
        async with asyncio.timeout(10):
            while (peer := pair.peers.get_now("x0", "e", pair.address)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert peer.transport == "nixl"
