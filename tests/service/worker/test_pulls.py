"""Blocks by real gRPC between two mapped pools: what arrives, what is refused, what is not written.

Real are Puller, GrpcTransport, BlockServer, the pools and gRPC. No engine is behind either side.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.common.config.transfer import TransferConfig
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.errors import LeaseLost
from tandem.net.rpc.auth import TokenInterceptor, token_metadata
from tandem.net.rpc.block_bytes import EncodedByHandler, encode
from tandem.net.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from tandem.transfer.grpc.producer import PROBE_BYTES_MAX, BlockServer
from tandem.transfer.grpc.reservations import MESSAGE_BYTES, Reservations
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.worker.engine_process.pool_view import MappedPool
from tandem.worker.kv_pulls.checksums import checksums
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.peer import Peer
from tandem.worker.prefill.leases import Lease, Leases

pytestmark = pytest.mark.service

BLOCK = 256 << 10
NUM_BLOCKS = 96  # 24 MiB: several streams carry them
TOKEN = "token"
ALL = list(range(NUM_BLOCKS))
TARGETS = list(reversed(ALL))

Fetch = Callable[[pb.FetchBlocksRequest, Any], AsyncIterator[bytes]]


class Producer(WorkerServicer):
    """FetchBlocks and Probe as a worker serves them, or as a test scripts the first."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK)
        memory[:] = b"".join(bytes([n + 1]) * BLOCK for n in ALL)
        self.pool = MappedPool(memory, BlockSpans.equal(BLOCK, len(memory) // BLOCK))
        self.memory = memory
        self.leases = Leases(TransferConfig(), num_blocks=NUM_BLOCKS)
        self.lease = Lease("lease", "d0")
        self.lease.block_ids = ALL
        self.leases.open(self.lease)
        self.num_served = 0
        self.streams: set[str] = set()
        link: Any = SimpleNamespace(pool=self.pool)
        served = WorkerMetrics(worker_id="p0", role="prefill").kv_bytes_served
        self._blocks = BlockServer(link, self.leases.lent, served.inc)
        self.fetch: Fetch = self._blocks.fetch

    async def FetchBlocks(  # noqa: N802
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> AsyncIterator[bytes]:
        self.streams.add(context.peer())
        async for message in self.fetch(request, context):
            self.num_served += 1
            yield message

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        async for message in self._blocks.probe(request, context):
            yield message


@dataclass
class Pair:
    producer: Producer
    peer: Peer
    link: Any
    config: TransferConfig
    memory: mmap.mmap
    num_mismatches: int = 0

    async def pull(self, block_ids: list[int] = ALL, run: pb.BlockRun | None = None) -> None:
        puller = Puller(
            self.config, self.link, spans=self.link.pool.spans, on_mismatch=self._on_mismatch
        )
        await puller.pull(
            self.peer,
            lease_id="lease",
            sequence_id="s",
            run=run or pb.BlockRun(first_block=0, block_ids=block_ids),
            targets=TARGETS[: len(block_ids)],
        )

    def transport(self, token: str = TOKEN) -> GrpcTransport:
        transport = self.peer.transports[token]
        assert isinstance(transport, GrpcTransport)
        return transport

    def _on_mismatch(self) -> None:
        self.num_mismatches += 1

    @property
    def written(self) -> list[int]:
        """The first byte of each target, in the run's order."""
        return [self.memory[block_id * BLOCK] for block_id in TARGETS]


@asynccontextmanager
async def a_pair(**settings: Any) -> AsyncIterator[Pair]:
    interceptors = [TokenInterceptor(TOKEN), EncodedByHandler()]
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    producer = Producer()
    add_WorkerServicer_to_server(producer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    config = TransferConfig(transport="grpc", **settings)
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK)
    link = SimpleNamespace(
        pool=MappedPool(memory, BlockSpans.equal(BLOCK, len(memory) // BLOCK)),
        reservations=Reservations(),
    )
    transports = {
        token: GrpcTransport("p0", address, link, config, PeerCalls("c", token))
        for token in (TOKEN, "other")
    }
    peer = Peer("p0", "e", WorkerStub(channel), channel, transports, TOKEN)
    try:
        yield Pair(producer, peer, link, config, memory)
    finally:
        for transport in transports.values():
            transport.close()
        await channel.close(None)
        await server.stop(None)


async def test_every_block_is_in_its_place() -> None:
    async with a_pair() as pair:
        await pair.pull()
        assert pair.memory[:] == b"".join(bytes([n + 1]) * BLOCK for n in TARGETS)
        assert len(pair.producer.streams) == 2  # connections of their own for a large pull
        assert pair.producer.num_served == NUM_BLOCKS * BLOCK // MESSAGE_BYTES


async def test_a_small_pull_goes_by_one_stream() -> None:
    async with a_pair() as pair:
        await pair.pull([5])
        assert pair.written[:2] == [6, 0]
        assert len(pair.producer.streams) == 1


async def test_a_pull_over_a_slow_link_takes_as_long_as_its_bytes() -> None:
    async with a_pair(bytes_per_s=BLOCK / 0.05) as pair:
        started = asyncio.get_running_loop().time()
        await pair.pull([5, 6])
        assert asyncio.get_running_loop().time() - started >= 0.1
        assert pair.written[:2] == [6, 7]


async def test_blocks_that_were_not_announced_are_refused() -> None:
    async with a_pair() as pair:
        pair.producer.lease.block_ids = ALL[:10]
        with pytest.raises(LeaseLost, match="PERMISSION_DENIED"):
            await pair.pull(ALL[5:11])
        assert pair.written == [0] * NUM_BLOCKS
        pair.producer.leases.close(pair.producer.lease)
        with pytest.raises(LeaseLost, match="NOT_FOUND"):
            await pair.pull([5])


async def test_nothing_is_read_once_the_lease_has_ended() -> None:
    async with a_pair() as pair:
        blocks = pair.producer.fetch

        async def ends(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            async for message in blocks(request, context):
                yield message
                if "lease" in pair.producer.leases:
                    pair.producer.leases.close(pair.producer.lease)

        pair.producer.fetch = ends
        with pytest.raises(LeaseLost, match=r"ABORTED|NOT_FOUND"):
            await pair.pull()
        assert pair.producer.num_served <= 2


@pytest.mark.parametrize("how", ["the engine is told", "cancelled"])
async def test_nothing_is_written_after_the_end(how: str) -> None:
    """More bytes are on their way when it ends; its blocks may be another sequence's by then."""
    async with a_pair() as pair:
        may_go_on, some_came = asyncio.Event(), asyncio.Event()

        async def slow(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            yield encode([bytes([1]) * BLOCK])
            some_came.set()
            await may_go_on.wait()
            for _ in request.block_ids[1:]:
                yield encode([bytes([2]) * BLOCK])

        pair.producer.fetch = slow
        pulling = asyncio.create_task(pair.pull(ALL[:8]))
        async with asyncio.timeout(5):
            await some_came.wait()
            while not pair.written[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        may_go_on.set()
        if how == "cancelled":
            pulling.cancel()
        else:
            pair.link.reservations.end("s")
        with pytest.raises((LeaseLost, asyncio.CancelledError)):
            await pulling
        assert pair.written[:8] == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("sizes", [[BLOCK], [BLOCK, BLOCK, BLOCK], [2 * BLOCK + 1], [0, 2 * BLOCK]])
async def test_bytes_that_are_not_the_run_are_a_lost_lease(sizes: list[int]) -> None:
    async with a_pair() as pair:

        async def lies(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            for size in sizes:
                yield encode([bytes([9]) * size])

        pair.producer.fetch = lies
        with pytest.raises(LeaseLost):
            await pair.pull(ALL[:2])
        assert not any(pair.written[2:])


async def test_a_connection_that_is_closed_is_no_cancellation() -> None:
    async with a_pair() as pair:

        async def hangs(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        pair.producer.fetch = hangs
        pulling = asyncio.create_task(pair.pull(ALL[:2]))
        async with asyncio.timeout(5):
            while not pair.producer.streams:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pair.peer.in_use.close()
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(pulling, 5)


async def test_a_producer_that_stands_still_is_lost_at_the_deadline() -> None:
    async with a_pair(pull_deadline_s=0.3) as pair:

        async def hangs(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        pair.producer.fetch = hangs
        with pytest.raises(LeaseLost, match="DEADLINE_EXCEEDED"):
            await asyncio.wait_for(pair.pull(ALL[:2]), 5)


async def test_a_block_that_changed_after_its_checksum_is_caught() -> None:
    async with a_pair(verify_blocks="all") as pair:
        run = pb.BlockRun(first_block=0, block_ids=ALL)
        run.checksums.extend(await checksums(pair.producer.pool, "lease", 0, ALL, 1))
        await pair.pull(run=run)
        pair.producer.memory[40 * BLOCK + 1234] ^= 1
        with pytest.raises(LeaseLost, match="block 40 of this worker has the checksum"):
            await pair.pull(run=run)
        assert pair.num_mismatches == 1


async def test_blocks_of_a_sequence_that_ended_are_no_mismatch() -> None:
    """It ends when its bytes are here, before the call is over, and another takes its blocks."""
    async with a_pair(verify_blocks="all") as pair:
        whole = pair.producer.fetch

        async def ends_late(request: pb.FetchBlocksRequest, context: Any) -> AsyncIterator[bytes]:
            async for message in whole(request, context):
                yield message
            while not all(pair.written):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if len(pair.link.reservations):  # several streams carry them
                pair.link.reservations.end("s")
                pair.memory[TARGETS[3] * BLOCK] ^= 1

        pair.producer.fetch = ends_late
        run = pb.BlockRun(first_block=0, block_ids=ALL)
        run.checksums.extend(await checksums(pair.producer.pool, "lease", 0, ALL, 1))
        with pytest.raises(LeaseLost, match="the pulls of sequence s were given up"):
            await pair.pull(run=run)
        assert pair.num_mismatches == 0
        assert not len(pair.link.reservations)


@pytest.mark.parametrize("num_bytes", [0, 1, MESSAGE_BYTES, 5 * MESSAGE_BYTES + 1])
async def test_a_probe_brings_as_much_as_was_asked_for(num_bytes: int) -> None:
    async with a_pair() as pair:
        assert await pair.transport().probe(num_bytes) > 0


async def test_a_probe_is_bounded_and_wants_the_token() -> None:
    async with a_pair() as pair:
        with pytest.raises(LeaseLost, match="INVALID_ARGUMENT"):
            await pair.transport().probe(PROBE_BYTES_MAX + 1)
        with pytest.raises(LeaseLost, match="UNAUTHENTICATED"):
            await pair.transport("other").probe(1)


async def test_any_client_of_the_proto_can_read_the_blocks() -> None:
    """The stub that protoc made, without a word of our own encoding."""
    async with a_pair() as pair:
        request = pb.FetchBlocksRequest(lease_id="lease", block_ids=[3, 1])
        call = pair.peer.stub.FetchBlocks(request, metadata=token_metadata(TOKEN))
        data = b"".join([message.data async for message in call])
        assert data == bytes([4]) * BLOCK + bytes([2]) * BLOCK
