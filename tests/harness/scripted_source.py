"""A prefill worker that follows a script, over real gRPC; and the engine's answers to a reader.

The reader under test (DecodeService, ReaderLease) is the real one. What stands in for its engine
process only records commands and settles pulls, because the tests are about what the reader does
with a source that misbehaves at a chosen moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from services.config import ClusterConfig, EngineConfig, TransferConfig, WorkerConfig
from services.engine.types import Reserved
from services.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from services.rpc.tandem.v1 import worker_pb2 as pb
from services.rpc.tandem.v1.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from services.transfer.protocol import PullResult
from services.worker.decode_service import DecodeService
from services.worker.messages import Add, Command, Remove, StartPull
from services.worker.metrics import WorkerMetrics
from services.worker.peers import Peer

PROMPT = list(range(100))  # 7 blocks of 16
Script = Callable[[AsyncIterator[pb.PrefillCommand], Any], AsyncIterator[pb.PrefillEvent]]


def accepted() -> pb.PrefillEvent:
    return pb.PrefillEvent(accepted=pb.Accepted(epoch="e"))


def run(first_block: int, *block_ids: int) -> pb.PrefillEvent:
    return pb.PrefillEvent(run=pb.BlockRun(first_block=first_block, block_ids=block_ids))


def prefilled(token_id: int = 5) -> pb.PrefillEvent:
    return pb.PrefillEvent(prefilled=pb.Prefilled(first_token_id=token_id))


class ScriptedSource(WorkerServicer):
    """Counts the streams that are open; `script` plays what follows `start`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_open = 0

    async def Prefill(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: Any
    ) -> AsyncIterator[pb.PrefillEvent]:
        self.num_open += 1
        try:
            async for event in self._script(request_iterator, context):
                yield event
        finally:
            self.num_open -= 1


@dataclass
class RecordingLink:
    """Settles each pull DONE after `pull_s`; one of a removed sequence is refused, as there."""

    pull_s: float = 0.0
    sent: list[Command] = field(default_factory=list)

    def send(self, command: Command, data: bytes | None = None) -> None:
        self.sent.append(command)

    def pull(self, command: StartPull) -> asyncio.Future[PullResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PullResult] = loop.create_future()
        known = not any(
            isinstance(c, Remove) and c.sequence_id == command.sequence_id for c in self.sent
        )
        result = PullResult(command.pull_id, done=known, error="" if known else "it is gone")
        loop.call_later(self.pull_s, lambda: future.done() or future.set_result(result))
        return future

    def names(self) -> list[str]:
        return [type(c).__name__ for c in self.sent if not isinstance(c, Add)]


class RecordingStream:
    def __init__(self) -> None:
        self.sequence_ids: set[str] = set()
        self.updates: list[pb.SequenceUpdate] = []

    def push(self, update: pb.SequenceUpdate) -> None:
        self.updates.append(update)


@dataclass
class OnePeer:
    peer: Peer

    async def get(self, worker_id: str, epoch: str, address: str) -> Peer:
        return self.peer


@dataclass
class Reader:
    """A DecodeService whose one prefill worker is the scripted source."""

    service: DecodeService
    link: RecordingLink
    stream: RecordingStream
    source: ScriptedSource
    server: grpc.aio.Server
    channel: grpc.aio.Channel

    def submit(self, request_id: str = "r") -> asyncio.Task[None]:
        """Submits a request whose blocks are reserved at once; its prefill task."""
        message = pb.SubmitSequence(
            request_id=request_id,
            attempt=1,
            input=pb.SequenceInput(token_ids=PROMPT, num_prompt_tokens=len(PROMPT), max_tokens=10),
            prefill_candidates=[pb.PrefillCandidate(worker_id="p0", epoch="e", address="x")],
        )
        self.service._submit(self.stream, message)  # type: ignore[arg-type]
        self.service._on_reserved(Reserved(f"{request_id}#1", 0, list(range(7))))
        task = self.service._sequences[f"{request_id}#1"].prefilling
        assert task is not None
        return task

    def cancel(self, request_id: str = "r") -> None:
        self.service._remove(f"{request_id}#1")


@asynccontextmanager
async def reader_of(script: Script, *, pull_s: float = 0.0) -> AsyncIterator[Reader]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    source = ScriptedSource(script)
    add_WorkerServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    peer = Peer("p0", "e", WorkerStub(channel), channel, "nixl")
    link = RecordingLink(pull_s)
    service = DecodeService(
        WorkerConfig(
            role="decode",
            cluster=ClusterConfig("c", "redis://", "token"),
            engine=EngineConfig(model="m"),
            transfer=TransferConfig(heartbeat_interval_s=0.1),
            worker_id="d0",
        ),
        link,  # type: ignore[arg-type]
        OnePeer(peer),  # type: ignore[arg-type]
        WorkerMetrics(worker_id="d0", role="decode"),
        block_bytes=64,
        max_model_len=1000,
    )
    try:
        yield Reader(service, link, RecordingStream(), source, server, channel)
    finally:
        await channel.close(None)
        await server.stop(None)
