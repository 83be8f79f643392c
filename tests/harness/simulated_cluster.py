"""A worker in one thread with a simulated clock: real services and engines, simulated transports.

Real are DecodeService, PrefillService, PrefixPuller, ConsumerLease, Puller, EngineLink,
EngineProcess, PullLedger, the transfer thread's commands, BlockReader, Fence and Engine. Simulated
are gRPC streams (simulated_streams.py), the sockets between a worker's two processes, NIXL
(simulated_nixl.py), and time. Tests decide which message is delivered, which engine makes a step,
which block arrives, and how late.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import zmq

from tandem.common.block_hash import HASH_VERSION
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.engine import EngineConfig
from tandem.common.config.transfer import TransferConfig
from tandem.common.config.worker import WorkerConfig
from tandem.common.worker_load import WorkerLoad
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.registry import KvCompatibility
from tandem.transfer.grpc.reservations import Reservations
from tandem.transfer.reads.block_reader import BlockReader
from tandem.transfer.thread import TransferThread
from tandem.worker.decode.prompt_prefill import Producers
from tandem.worker.decode.service import DecodeService
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.link import EngineLink, PoolThroughEngine, _replies
from tandem.worker.engine_process.pool_view import MappedPool
from tandem.worker.engine_process.process import EngineProcess
from tandem.worker.engine_process.pull_ledger import PullLedger
from tandem.worker.kv_pulls.lease import ConsumerLease
from tandem.worker.kv_pulls.puller import Puller
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.parts import WorkerParts
from tandem.worker.peers.rates import Rates
from tandem.worker.prefill.prefix_pull import PrefixPuller
from tandem.worker.prefill.service import PrefillService
from tests.grouped_toy import Windows, make_grouped_engine
from tests.harness.simulated_loop import SimulatedLoop


class Socket:
    """One end of a pair of ZeroMQ sockets."""

    closed = False

    def __init__(self) -> None:
        self.received: deque[list[Any]] = deque()
        self.sent: deque[list[Any]] = deque()

    def poll(self, timeout: int = 0) -> bool:
        return False

    def recv_multipart(self, flags: int = 0) -> list[Any]:
        if not self.received:
            raise zmq.Again
        return self.received.popleft()

    def send_multipart(self, frames: list[Any], copy: bool = True) -> Future[None]:
        self.sent.append(frames)
        is_sent: Future[None] = Future()
        is_sent.set_result(None)
        return is_sent

    def send(self, frame: bytes) -> None:
        self.sent.append([frame])


class Node:
    """A worker: both processes and the transfer thread, each advanced by the test."""

    def __init__(
        self,
        loop: SimulatedLoop,
        worker_id: str,
        epoch: str,
        peers: Any,
        *,
        maps_pool: bool,
        windows: Windows,
        kv_dtype: str,
        **limits: int,
    ) -> None:
        """With `maps_pool` the I/O process accesses the pool directly instead of through its
        engine."""
        self.worker_id, self.epoch = worker_id, epoch
        self.is_dead = self.hangs = False
        quarantine_blocks_max = limits.pop("quarantine_blocks_max")
        config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig("c", "redis://", "token"),
            engine=EngineConfig(model="toy", block_size=limits["block_size"]),
            transfer=TransferConfig(
                prefill_at="remote",
                local_prefill_max_tokens=0,
                heartbeat_interval_s=1.0,
                heartbeat_timeout_s=4.0,
                pull_deadline_s=8.0,
                quarantine_blocks_max=quarantine_blocks_max,
            ),
            worker_id=worker_id,
        )
        self.engine, self.runner = make_grouped_engine(windows, kv_dtype=kv_dtype, **limits)
        self._make_process(loop, config)
        self._make_link(maps_pool)
        metrics = WorkerMetrics(worker_id=worker_id, role="decode")
        rates = Rates(config, self.engine.unmeasured_rates)
        puller = Puller(config.transfer, self.link, spans=self.engine.layout.spans)
        make_lease = partial(ConsumerLease, puller=puller, rates=rates, config=config)
        compatibility = KvCompatibility(
            model_fingerprint="toy",
            compute_dtype=self.runner.dtype_name,
            numerics=self.runner.numerics_name,
            block_size=limits["block_size"],
            kv_dtype=self.runner.kv_dtype_name,
            layout=self.engine.layout.describe(),
            hash_version=HASH_VERSION,
        )
        self.chain_root = compatibility.chain_root(b"")
        prefixes = PrefixPuller(config, compatibility, peers, rates, metrics, make_lease)
        parts = WorkerParts(config, self.link, rates, metrics)
        producers = Producers(peers, prefixes, make_lease)
        identity = pb.PrefixHolder(worker_id=worker_id, epoch=epoch, address="here")
        self.decode = DecodeService(parts, producers, identity, self.engine.max_model_len)
        self.prefill = PrefillService(parts, prefixes, epoch=epoch, num_blocks=limits["num_blocks"])

    @property
    def peer_id(self) -> str:
        return f"{self.worker_id}/{self.epoch}"

    def _make_process(self, loop: SimulatedLoop, config: WorkerConfig) -> None:
        process: Any = object.__new__(EngineProcess)
        process._runner = self.runner
        process._engine = self.engine
        process._bytes = pool_bytes(self.runner.kv, self.engine.layout)
        process._commands = self.socket = Socket()
        process._transfers = self.transfers = Socket()
        process._wake = process._wake_sender = Socket()
        process._settled = SimpleQueue()
        process._ledger = PullLedger()
        process._tick = 0
        process._failed = []
        process._stopping = False
        process._num_commands = 0
        pool = process._pool_transfers().pool
        self.remote_pool = pool.remote()
        self.thread = process._transfer = TransferThread(
            pool, config.transfer, self.peer_id, process._on_transfer_event
        )
        self.consumer = self.thread._readers["nixl"] = BlockReader(
            pool,
            self.thread._nixl_agent,
            quarantine_blocks_max=config.transfer.quarantine_blocks_max,
            clock=loop.time,
        )
        self.process = process

    def _make_link(self, maps_pool: bool) -> None:
        link: Any = object.__new__(EngineLink)
        link._pulls, link._answers = {}, {}
        link._request_ids = itertools.count(1)
        link.reservations = Reservations()
        memory: Any = self.runner.kv.numpy().reshape(-1).view("u1")
        spans = self.engine.layout.spans
        mapped = MappedPool(memory, spans)
        through = PoolThroughEngine(link, spans)
        link.pool = mapped if maps_pool else through
        link._commands = outbox = Socket()
        outbox.sent = self.socket.received
        link._on_event = self._on_event
        link.num_reports = 0
        link.num_sent = 0
        link.is_awaited = False
        self.link = link

    def _on_event(self, event: messages.Event) -> None:
        match event:
            case messages.Report():
                self.prefill.on_report(event)
                self.decode.on_report(event, WorkerLoad())
            case messages.BlocksFinal(final_blocks):
                self.prefill.on_final_blocks(final_blocks)

    def turn(self) -> None:
        """Runs one iteration of the engine process, like EngineProcess.run."""
        if not (self.is_dead or self.hangs):
            self.process._tick += 1
            self.process._apply_transfer_events()
            self.process._apply_commands()
            self.process._turn()
        self._dispatch()

    def turn_transfers(self) -> None:
        """Runs one iteration of the transfer thread, without its sleep."""
        for _ in range(self.thread._commands.qsize()):
            self.thread._commands.get_nowait()()
        self.thread._report()
        self._dispatch()

    def _dispatch(self) -> None:
        for socket in (self.transfers, self.socket):
            while socket.sent:
                first, *data = socket.sent.popleft()
                frames = [first, *(SimpleNamespace(buffer=memoryview(each)) for each in data)]
                self.link._dispatch(_replies.decode(first), frames)
