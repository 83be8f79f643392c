"""A consumer with a real engine process, and producers in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import numpy as np

from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.perf_model.rates import WorkerRates
from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode, Reserved, SequenceSpec
from tandem.net.rpc.options import CHANNEL_OPTIONS
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.transfer.engine_transport import EngineTransport
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.transfer.protocol import Transport
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Add, Event, Remove, Report
from tandem.worker.engine_process.program import start_program
from tandem.worker.kv_pulls.lease import ConsumerLease
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.peers.peer import Peer
from tandem.worker.peers.rates import Rates
from tests.service.nixl_harness import DEADLINE_S, PoolProcess, transfer_config
from tests.service.transfer_pools import PoolBlocks, contents, layout, scattered_blocks

TOKEN = "token"
PATTERN = 7


def producer_block_ids(num_blocks: int) -> list[int]:
    """The blocks that a producer has a prompt of so many blocks in."""
    return scattered_blocks(seed=1)[:num_blocks]


def mapped_pools(pid: int) -> set[str]:
    """The inodes of the pools in shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:tandem-kv" in line}


class Producer(PoolProcess):
    """A producer that is read over any transport."""

    def __init__(self, seed: int) -> None:
        super().__init__("tests.service.transfer_source_process", seed)
        self.worker_id = f"producer-{seed}"
        self.contents = PoolBlocks(contents(seed), layout().spans)
        port, offer = msgspec.msgpack.decode(base64.b64decode(self.line()))
        self.address = f"127.0.0.1:{port}"
        self.pools = mapped_pools(self.process.pid)
        self.offer = pb.ConnectResponse.FromString(offer)

    def num_leases(self) -> int:
        """Returns how many stay open: one whose stream the consumer saw end ends here soon."""
        until = time.monotonic() + DEADLINE_S
        while (found := self._num_leases_now()) and time.monotonic() < until:
            time.sleep(0.01)
        return found

    def _num_leases_now(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.line())


class Consumer:
    """The I/O process of a consumer; `run` its coroutines in `runner`."""

    def __init__(self, transport: str) -> None:
        self.runner = asyncio.Runner()
        self._transport = transport
        self.config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig("c", "redis://", TOKEN),
            engine=EngineConfig(model="", block_size=layout().block_size),
            transfer=transfer_config(),
            worker_id="reader",
        )
        self.runner.run(self._start())

    async def _start(self) -> None:
        program = await start_program("tests.service.transfer_reader_engine")
        self.link = EngineLink(self.config, "1", self._on_event, program)
        self._reserved: dict[str, asyncio.Future[list[int]]] = {}
        self._names = itertools.count()
        ready = await self.link.start()
        assert ready.pool_is_shared
        pool: Any = self.link.pool
        self.blocks = PoolBlocks(np.frombuffer(pool._memory, np.uint8), layout().spans)
        self._rates = Rates(self.config, WorkerRates(block_bytes=layout().block_bytes))
        self._peers: dict[str, Peer] = {}

    def close(self) -> None:
        self.runner.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        await self.link.stop()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Report):
            for reserved in event.step.reserved:
                self._on_reserved(reserved)

    def _on_reserved(self, reserved: Reserved) -> None:
        self._reserved.pop(reserved.sequence_id).set_result(reserved.block_ids)

    async def peer(self, producer: Producer) -> Peer:
        """The producer, connected over the transport under test."""
        peer = self._peers.get(producer.address)
        if peer is None:
            channel = grpc.aio.insecure_channel(producer.address, options=CHANNEL_OPTIONS)
            transport: Transport
            if self._transport in ("nixl", "cuda_ipc"):
                name: Any = self._transport
                transport = EngineTransport(name, f"{producer.worker_id}-e", self.link)
            else:
                transport = GrpcTransport(
                    producer.worker_id,
                    producer.address,
                    self.link,
                    self.config.transfer,
                    PeerCalls("c", TOKEN),
                )
            stub = WorkerStub(channel)
            peer = Peer(
                producer.worker_id,
                "e",
                stub,
                channel,
                {self._transport: transport},
                self._transport,
            )
            assert await transport.connect(producer.offer), "nothing was measured"
            assert self.maps(producer) == (self._transport == "cuda_ipc")
            self._peers[producer.address] = peer
        return peer

    def maps(self, producer: Producer) -> bool:
        """Whether the engine process has mapped the memory of the producer's pool."""
        assert self.link._process is not None
        return bool(producer.pools & mapped_pools(self.link._process.pid))

    def forget(self, producer: Producer) -> None:
        self._peers.pop(producer.address).close()

    async def begin(
        self,
        producer: Producer,
        num_blocks: int,
        *,
        first_missing: int = 0,
        fate: str = "",
        transfer: TransferConfig | None = None,
    ) -> Pulling:
        """Reserves blocks and opens a lease for them. `fate`: see transfer_source_process.py."""
        peer = await self.peer(producer)
        tokens = [1] * (num_blocks * layout().block_size)
        sequence_id = f"sequence-{next(self._names)}"
        spec = SequenceSpec(
            sequence_id,
            tokens,
            len(tokens),
            Mode.WAITING_FOR_REMOTE_KV,
            SamplingParams(temperature=0, max_tokens=1),
        )
        future = self._reserved[sequence_id] = asyncio.get_running_loop().create_future()
        self.link.send(Add(spec))
        table = await asyncio.wait_for(future, DEADLINE_S)
        puller = Puller(transfer or self.config.transfer, self.link, spans=layout().spans)
        lease = ConsumerLease(peer, puller=puller, rates=self._rates, config=self.config)
        running = lease.run(
            spec,
            request_id=fate,
            first_missing_block=first_missing,
            targets=table[first_missing:],
            on_first_token=lambda token_id, stats: None,
        )
        return Pulling(self, sequence_id, table, lease, asyncio.create_task(running))

    async def whole(self) -> None:
        """Waits until no sequence, no read and no quarantined block is left in the engine."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.link.check_integrity():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not len(self.link.reservations)
        assert not self.link._pulls


class Pulling:
    """A lease under way, and the table of its sequence."""

    def __init__(
        self,
        consumer: Consumer,
        sequence_id: str,
        table: list[int],
        lease: ConsumerLease,
        task: asyncio.Task[int],
    ) -> None:
        self.table = table
        self.lease = lease
        self._consumer = consumer
        self._sequence_id = sequence_id
        self._task = task

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Looks at every turn of the event loop."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_true():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def end(self) -> None:
        """Waits for its end, well or not, and lets go of the blocks, as a worker does."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._task
        finally:
            self._consumer.link.send(Remove(self._sequence_id))

    def client_goes(self) -> None:
        self._task.cancel()
