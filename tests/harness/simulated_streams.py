"""Simulated gRPC between workers: `Prefill` and `FetchBlocks` calls whose messages the test
delivers.

A message is queued until it is delivered, or lost if the call is cut at either end. A call
abandoned by its consumer ends at the producer when the notice is delivered, or by a ping.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from tandem.common.config.transfer import TransferConfig
from tandem.errors import WorkerLost
from tandem.net.rpc.peer_calls import PeerCalls
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.transfer.engine_transport import EngineTransport
from tandem.transfer.grpc.transport import GrpcTransport
from tandem.transfer.protocol import Transport
from tandem.transfer.reads.messages import PeerRank
from tests.harness.simulated_cluster import Node

_CLOSE, _CUT = object(), object()


class Call:
    """What both kinds of calls share: two queues, a handler at the producer, and one end on each
    side."""

    def __init__(self, producer: Node, consumer: Node) -> None:
        self.producer, self.consumer = producer, consumer
        self.to_producer: deque[Any] = deque()
        self.to_consumer: deque[Any] = deque()
        self._commands: asyncio.Queue[Any] = asyncio.Queue()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._handler: asyncio.Task[None] | None = None
        self._producer_ended = self._consumer_ended = False

    @property
    def is_open_at_producer(self) -> bool:
        return self._handler is not None and not self._producer_ended

    @property
    def is_open_at_consumer(self) -> bool:
        return not self._consumer_ended

    @property
    def wires(self) -> list[Callable[[], None]]:
        """The deliveries that are possible now."""
        found = [self.deliver_to_producer] if self.to_producer else []
        return [*found, self.deliver_to_consumer] if self.to_consumer else found

    def cancel(self) -> None:
        if not self._consumer_ended:
            self._consumer_ended = True
            self._send_to_producer(_CLOSE)

    def deliver_to_producer(self) -> None:
        message = self.to_producer.popleft()
        if message is _CLOSE:
            self.end_at_producer()
            return
        self._commands.put_nowait(message)
        if self._handler is None:
            self._handler = asyncio.get_event_loop().create_task(self._run())

    def deliver_to_consumer(self) -> None:
        self._events.put_nowait(self.to_consumer.popleft())

    def end_at_producer(self) -> None:
        """Ends the call at the producer. Messages under way to it are lost."""
        self.to_producer.clear()
        if self._handler is None and not self._producer_ended:
            self._producer_ended = True
            self.to_consumer.append(_CUT)
        elif self._handler is not None:
            self._handler.cancel()

    def end_at_consumer(self) -> None:
        """Ends the call at the consumer. Messages under way to it are lost."""
        self.to_consumer.clear()
        self._events.put_nowait(_CUT)

    def consumer_crashed(self, *, reachable: bool) -> None:
        """Simulates the crash of the consumer's process: its system reports it, or only a ping
        detects it."""
        was_open = not self._consumer_ended
        self._consumer_ended = True
        if was_open and reachable:
            self._send_to_producer(_CLOSE)

    def ping(self) -> None:
        """The producer checks whether its consumer still exists: gRPC's keepalive."""
        if self._consumer_ended and not self.to_producer:
            self.end_at_producer()

    def _send_to_producer(self, message: object) -> None:
        if not (self._producer_ended or self.producer.is_dead):
            self.to_producer.append(message)

    async def _run(self) -> None:
        end: object = _CUT
        try:
            await self._serve()
            end = grpc.aio.EOF  # type: ignore[attr-defined]
        except _Aborted:
            pass
        finally:
            self._producer_ended = True
            self.to_consumer.append(end)

    async def _serve(self) -> None:
        raise NotImplementedError


class Stream(Call):
    """A `Prefill` call, which is a lease."""

    def __init__(self, producer: Node, consumer: Node) -> None:
        super().__init__(producer, consumer)
        self.start: pb.StartPrefill | None = None  # the first command, or None if it was a hold
        self.hold: pb.HoldBlocks | None = None
        self.lent: list[int] = []  # blocks that the producer offered to the consumer
        self.released: pb.Released | None = None  # as received by the consumer

    @property
    def opening(self) -> pb.StartPrefill | pb.HoldBlocks | None:
        return self.start or self.hold

    @property
    def lease_id(self) -> str:
        return self.opening.lease_id if self.opening else ""

    @property
    def is_whole(self) -> bool:
        """Says whether the consumer was told that the producer kept this lease until its end."""
        released = self.released
        said = (released.epoch, released.lease_id, released.whole) if released else None
        return said == (self.producer.epoch, self.lease_id, True)

    async def write(self, command: pb.PrefillCommand) -> None:
        if self._consumer_ended:
            raise _broken()
        match command.WhichOneof("command"):
            case "start":
                self.start = command.start
            case "hold":
                self.hold = command.hold
        self._send_to_producer(command)

    async def read(self) -> Any:
        event = await self._events.get()
        if event is _CUT:
            self._consumer_ended = True
            raise _broken()
        return event

    def deliver_to_consumer(self) -> None:
        message = self.to_consumer[0]
        if isinstance(message, pb.PrefillEvent) and message.HasField("released"):
            self.released = message.released
        super().deliver_to_consumer()

    async def _serve(self) -> None:
        context = SimpleNamespace(abort=_abort, peer=lambda: self.consumer.peer_id)
        async for event in self.producer.prefill.serve(self._read_commands(), context):
            if event.HasField("run"):
                self.lent += event.run.block_ids
            self.to_consumer.append(event)

    async def _read_commands(self) -> AsyncIterator[pb.PrefillCommand]:
        while True:
            yield await self._commands.get()


class Fetch(Call):
    """A `FetchBlocks` call."""

    def __init__(
        self, producer: Node, consumer: Node, request: pb.FetchBlocksRequest, deadline_s: float
    ) -> None:
        super().__init__(producer, consumer)
        self.lease_id = request.lease_id
        self._deadline_at = asyncio.get_running_loop().time() + deadline_s
        self._send_to_producer(request)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while True:
                async with asyncio.timeout_at(self._deadline_at):
                    event = await self._events.get()
                if event is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                if event is _CUT:
                    raise _broken()
                yield event
        except TimeoutError:
            raise _broken() from None
        finally:
            self.cancel()

    async def _serve(self) -> None:
        request = self._commands.get_nowait()
        context = SimpleNamespace(abort=_abort)
        async for message in self.producer.prefill.blocks.fetch(request, context):
            self.to_consumer.append(message)


class PeersOf:
    """Replaces `tandem.worker.peers.peers.Peers`: knows which workers run, and opens simulated
    calls."""

    def __init__(
        self,
        consumer_id: str,
        nodes: dict[str, Node],
        streams: list[Stream],
        fetches: list[Fetch],
        by_grpc: set[str],
    ) -> None:
        """`by_grpc` has the workers whose blocks are transferred by gRPC."""
        self._consumer_id = consumer_id
        self._nodes = nodes
        self._streams = streams
        self._fetches = fetches
        self._by_grpc = by_grpc

    async def get(self, worker_id: str, epoch: str, address: str) -> Any:
        peer = self.get_now(worker_id, epoch, address)
        if peer is None:
            raise WorkerLost(f"{worker_id} runs as another process now")
        return peer

    def get_now(self, worker_id: str, epoch: str, address: str) -> Any:
        producer = self._nodes[worker_id]
        consumer = self._nodes[self._consumer_id]
        if producer.epoch != epoch:
            return None
        rank = PeerRank(producer.peer_id.encode(), producer.remote_pool)
        consumer.consumer.connect(producer.peer_id, [rank])

        def open_stream(metadata: object) -> Stream:
            self._streams.append(Stream(producer, consumer))
            return self._streams[-1]

        def fetch(stream: int, request: pb.FetchBlocksRequest, deadline_s: float) -> Fetch:
            self._fetches.append(Fetch(producer, consumer, request, deadline_s))
            return self._fetches[-1]

        by_nixl = EngineTransport("nixl", producer.peer_id, consumer.link)
        calls = PeerCalls("c", "token")
        by_grpc = GrpcTransport(worker_id, address, consumer.link, TransferConfig(), calls)
        by_grpc.fetch = fetch  # type: ignore[method-assign]
        in_use: Transport = by_grpc if worker_id in self._by_grpc else by_nixl
        return SimpleNamespace(
            worker_id=worker_id,
            epoch=epoch,
            peer_id=producer.peer_id,
            transport=in_use.name,
            in_use=in_use,
            stub=SimpleNamespace(Prefill=open_stream),
        )


class _Aborted(Exception):
    pass


async def _abort(code: grpc.StatusCode, message: str) -> None:
    raise _Aborted


def _broken() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "cut", None)
