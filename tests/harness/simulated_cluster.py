"""A cluster in one thread and under one clock: real services and engines, simulated wires.

Real are DecodeService, ReaderLease, PrefillService, EngineLink, EngineProcess, PullLedger, the
transfer thread's commands, NixlReader, Fence and Engine. Simulated are gRPC streams, the sockets
between a worker's two processes, NIXL, and time. Nothing moves by itself: tests say which message
arrives, which engine turns, which block lands, and how late it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import zmq

from services.block_hash import HASH_VERSION
from services.config import ClusterConfig, EngineConfig, TransferConfig, WorkerConfig
from services.engine.pool_bytes import PoolBytes
from services.errors import WorkerLost
from services.registry import Contract
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.transfer.nixl import NixlReader
from services.transfer.nixl_source import remote_pool
from services.transfer.thread import TransferThread
from services.worker import messages
from services.worker.decode_service import DecodeService
from services.worker.engine_link import EngineLink, _replies
from services.worker.engine_process import EngineProcess
from services.worker.lease import ReaderLease
from services.worker.metrics import WorkerMetrics
from services.worker.prefill_service import PrefillService
from services.worker.prefix_pull import PrefixPuller
from services.worker.pull_ledger import PullLedger
from services.worker.pulls import Puller
from services.worker.rates import Rates
from tests.engine_driver import make_engine
from tests.harness.simulated_loop import SimulatedLoop

_CLOSE, _CUT = object(), object()


class Socket:
    """One end of a pair of ZeroMQ sockets."""

    def __init__(self) -> None:
        self.received: deque[list[Any]] = deque()
        self.sent: deque[list[Any]] = deque()

    def poll(self, timeout: int = 0) -> bool:
        return False

    def recv_multipart(self, flags: int = 0) -> list[Any]:
        if not self.received:
            raise zmq.Again
        return self.received.popleft()

    def send_multipart(self, frames: list[Any], copy: bool = True) -> None:
        self.sent.append(frames)

    def send(self, frame: bytes) -> None:
        self.sent.append([frame])


class Node:
    """A worker: both its processes and its transfer thread, each moved by hand."""

    def __init__(
        self, loop: SimulatedLoop, worker_id: str, epoch: str, peers: Any, **limits: int
    ) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self.is_dead = self.hangs = False
        quarantine_blocks_max = limits.pop("quarantine_blocks_max")
        config = WorkerConfig(
            role="decode",
            cluster=ClusterConfig("c", "redis://", "token"),
            engine=EngineConfig(model="toy", block_size=limits["block_size"]),
            transfer=TransferConfig(
                local_prefill_max_tokens=0,
                heartbeat_interval_s=1.0,
                heartbeat_timeout_s=4.0,
                pull_deadline_s=8.0,
                quarantine_blocks_max=quarantine_blocks_max,
            ),
            worker_id=worker_id,
        )
        self.engine, self.runner = make_engine(**limits)
        self._make_process(loop, config)
        self._make_link()
        metrics = WorkerMetrics(worker_id=worker_id, role="decode")
        block_bytes = self.engine.layout.block_bytes
        rates = Rates(config, block_bytes=block_bytes)
        puller = Puller(config.transfer, self.link, token="token", block_bytes=block_bytes)
        make_lease = partial(ReaderLease, puller=puller, rates=rates, config=config)
        contract = Contract(
            model_fingerprint="toy",
            compute_dtype=self.runner.dtype_name,
            numerics=config.engine.numerics,
            block_size=limits["block_size"],
            kv_dtype=self.runner.kv_dtype_name,
            layout=self.engine.layout.describe(),
            hash_version=HASH_VERSION,
        )
        prefixes = PrefixPuller(config, contract, peers, rates, metrics, make_lease)
        self.decode = DecodeService(
            config,
            self.link,
            peers,
            metrics,
            rates=rates,
            prefixes=prefixes,
            make_lease=make_lease,
            block_bytes=block_bytes,
            max_model_len=self.engine.max_model_len,
        )
        self.prefill = PrefillService(
            config,
            epoch,
            self.link,
            metrics,
            rates,
            prefixes,
            block_bytes=block_bytes,
            num_blocks=limits["num_blocks"],
        )

    @property
    def peer_id(self) -> str:
        return f"{self.worker_id}/{self.epoch}"

    def _make_process(self, loop: SimulatedLoop, config: WorkerConfig) -> None:
        process: Any = object.__new__(EngineProcess)
        process._runner, process._engine = self.runner, self.engine
        process._bytes = PoolBytes(self.runner.kv, self.engine.layout)
        process._commands = self.socket = Socket()
        process._transfers = self.transfers = Socket()
        process._wake = process._wake_sender = Socket()
        process._settled = SimpleQueue()
        process._ledger = PullLedger()
        process._tick, process._failed, process._stopping = 0, [], False
        pool = process._local_pool()
        self.remote_pool = remote_pool(pool)
        self.thread = process._transfer = TransferThread(
            pool, config.transfer, self.peer_id, process._on_transfer_event
        )
        self.reader = self.thread._transport = NixlReader(
            pool,
            f"{self.peer_id}-reader",
            quarantine_blocks_max=config.transfer.quarantine_blocks_max,
            clock=loop.time,
        )
        self.process = process

    def _make_link(self) -> None:
        link: Any = object.__new__(EngineLink)
        link._pulls, link._answers = {}, {}
        link._commands = outbox = Socket()
        outbox.sent = self.socket.received
        link.on_report = self._on_report
        link.on_transfer = lambda reply: None
        link.num_reports, link.is_awaited = 0, False
        self.link = link

    def _on_report(self, report: messages.Report) -> None:
        self.prefill.on_report(report)
        self.decode.on_report(report, pb.WorkerLoad())

    def turn(self) -> None:
        """One turn of the engine process, as in EngineProcess.run."""
        if not (self.is_dead or self.hangs):
            self.process._tick += 1
            self.process._apply_transfer_events()
            self.process._apply_commands()
            self.process._turn()
        self._dispatch()

    def turn_transfers(self) -> None:
        """One turn of the transfer thread, without its sleep."""
        for _ in range(self.thread._commands.qsize()):
            self.thread._commands.get_nowait()()
        self.thread._report()
        self._dispatch()

    def _dispatch(self) -> None:
        for socket in (self.transfers, self.socket):
            while socket.sent:
                frames = socket.sent.popleft()
                self.link._dispatch(_replies.decode(frames[0]), frames)


class Stream:
    """One `Prefill` call. What was written waits here until it is delivered, or is lost."""

    def __init__(self, source: Node, reader: Node) -> None:
        self.source, self.reader = source, reader
        self.start: pb.StartPrefill | None = None
        self.lent: list[int] = []  # blocks that the source named to the reader
        self.released: pb.Released | None = None  # as it came to the reader
        self.to_source: deque[Any] = deque()
        self.to_reader: deque[Any] = deque()
        self._commands: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._handler: asyncio.Task[None] | None = None
        self._source_ended = self._reader_ended = False

    @property
    def is_open_at_source(self) -> bool:
        return self._handler is not None and not self._source_ended

    async def write(self, command: pb.PrefillCommand) -> None:
        if self._reader_ended:
            raise _broken()
        if command.WhichOneof("command") == "start":
            self.start = command.start
        self._send_to_source(command)

    async def read(self) -> Any:
        event = await self._events.get()
        if event is _CUT:
            self._reader_ended = True
            raise _broken()
        return event

    def cancel(self) -> None:
        if not self._reader_ended:
            self._reader_ended = True
            self._send_to_source(_CLOSE)

    def deliver_to_source(self) -> None:
        message = self.to_source.popleft()
        if message is _CLOSE:
            self.end_at_source()
            return
        self._commands.put_nowait(message)
        if self._handler is None:
            self._handler = asyncio.get_event_loop().create_task(self._serve())

    def deliver_to_reader(self) -> None:
        message = self.to_reader.popleft()
        if isinstance(message, pb.PrefillEvent) and message.HasField("released"):
            self.released = message.released
        self._events.put_nowait(message)

    def end_at_source(self) -> None:
        """The source hears that the stream has ended, and what was on its way to it is lost."""
        self.to_source.clear()
        if self._handler is None and not self._source_ended:
            self._source_ended = True
            self.to_reader.append(_CUT)
        elif self._handler is not None:
            self._handler.cancel()

    def end_at_reader(self) -> None:
        """The reader hears that the stream has ended, and what was on its way to it is lost."""
        self.to_reader.clear()
        self._events.put_nowait(_CUT)

    def ping(self) -> None:
        """The source asks whether its reader is still there: gRPC's keepalive."""
        if self._reader_ended and not self.to_source:
            self.end_at_source()

    def _send_to_source(self, message: object) -> None:
        if not (self._source_ended or self.source.is_dead):
            self.to_source.append(message)

    async def _serve(self) -> None:
        end: object = _CUT
        try:
            async for event in self.source.prefill.serve(self._read_commands(), None):
                if event.HasField("run"):
                    self.lent += event.run.block_ids
                self.to_reader.append(event)
            end = grpc.aio.EOF  # type: ignore[attr-defined]
        finally:
            self._source_ended = True
            self.to_reader.append(end)

    async def _read_commands(self) -> AsyncIterator[pb.PrefillCommand]:
        while True:
            yield await self._commands.get()


class PeersOf:
    """services.worker.peers.Peers: knows who lives, and hands out simulated streams."""

    def __init__(self, sources: dict[str, Node], streams: list[Stream]) -> None:
        self.reader: Node | None = None
        self._sources = sources
        self._streams = streams

    async def get(self, worker_id: str, epoch: str, address: str) -> Any:
        source = self._sources[worker_id]
        if source.epoch != epoch:
            raise WorkerLost(f"{worker_id} runs as another process now")
        assert self.reader is not None
        self.reader.reader.connect(source.peer_id, source.peer_id.encode(), source.remote_pool)
        return SimpleNamespace(
            worker_id=worker_id,
            peer_id=source.peer_id,
            transport="nixl",
            stub=SimpleNamespace(Prefill=lambda metadata: self._open(source)),
        )

    def _open(self, source: Node) -> Stream:
        assert self.reader is not None
        stream = Stream(source, self.reader)
        self._streams.append(stream)
        return stream


def _broken() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "cut", None)
