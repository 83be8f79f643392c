"""KV events for programs outside of the cluster, over ZeroMQ in the format of vLLM and llm-d.

    socket  messages
    PUB     [topic, sequence number, payload]; the number is 8 bytes, big-endian, from 0 on
    ROUTER  a subscriber sends [number]; it gets [number, payload] of each kept batch from that
            number on, then [-1, empty]. A DEALER socket gets them all, a REQ socket only the first.

A payload is msgpack of [time in s, events, data-parallel rank]. An event is an array that begins
with the name of its kind. The first event of a process is AllBlocksCleared, because its pool is
empty. A slow subscriber loses batches and can detect that by gaps in the numbers. A worker never
waits for a subscriber.

Format: https://docs.vllm.ai/en/stable/api/vllm/distributed/kv_events/
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from tandem.common.adapter import Adapter
from tandem.common.config.worker import WorkerConfig
from tandem.common.process.cancellation import cancel
from tandem.engine.types import BlockChanges, StepReport, StoredBlock
from tandem.errors import ConfigError
from tandem.models.source import resolve

log = logging.getLogger(__name__)

_MEDIUM = "GPU"  # subscribers expect this name for the KV pool, even if the pool is on a CPU
_QUEUE_MAX = 10_000  # at most this many batches wait for one slow subscriber
_KEPT_BYTES_MAX = 64 << 20  # largest total size of the batches kept for replays
_REPLAY_DEADLINE_S = 5.0  # time limit in seconds for one message to a subscriber that does not read
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of one chain. `token_ids` has the tokens of all blocks, or is empty if
    they are not known."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # None: the first block has no parent
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None  # None: base model or unknown
    medium: str | None = _MEDIUM
    lora_name: str | None = None  # newer subscribers require this field


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[bytes]
    medium: str | None = _MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


class ToldBlocks:
    """Turns step reports into events, and keeps the set of blocks that subscribers know.

    The parent of a block is the block before it in the prompt. A subscriber that does not know the
    parent would take the block for the first one of a prompt. So a block is published only if it is
    the first one or subscribers know its parent.

    Subscribers may not know a parent if all layers of the model have an attention window. The
    parent may then be removed before the block after it is stored. That block is not published.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: set[bytes] = set()

    def take(self, step: StepReport) -> list[Event]:
        """Returns the events for the blocks that a step stored and removed."""
        changes = step.chains or BlockChanges(step.stored, step.removed)
        stored = list(self._stored(changes.stored))
        removed = [each for each in changes.removed if each in self._held]
        self._held.difference_update(removed)
        return [*stored, *([BlockRemoved(removed)] if removed else [])]

    def _stored(self, blocks: Iterable[StoredBlock]) -> Iterator[BlockStored]:
        """Yields an event for each run of successive blocks of one chain.

        Imported blocks have no token ids, so they are in separate events.
        """
        run: list[StoredBlock] = []
        for block in blocks:
            if block.index and block.parent_hash not in self._held:
                continue
            self._held.add(block.block_hash)
            if run:
                last = run[-1]
                is_next = block.index and block.parent_hash == last.block_hash
                if not is_next or bool(block.token_ids) != bool(last.token_ids):
                    yield self._event(run)
                    run = []
            run.append(block)
        if run:
            yield self._event(run)

    def _event(self, run: list[StoredBlock]) -> BlockStored:
        adapter = run[0].adapter  # the blocks of a run are of one chain, which has one adapter
        return BlockStored(
            [block.block_hash for block in run],
            run[0].parent_hash if run[0].index else None,
            [token_id for block in run for token_id in block.token_ids],
            self._block_size,
            lora_id=None if adapter is None else _lora_id(adapter),
            lora_name=None if adapter is None else adapter.name,
        )


class KvEvents:
    """The ZeroMQ sockets for one worker's KV events. `on_report` sends events at once; a separate
    task serves replays of past events."""

    @classmethod
    async def open(cls, config: WorkerConfig) -> Self:
        """Opens the sockets. Raises ConfigError if an endpoint cannot be used."""
        model = config.events.kv_events_model
        if not model:
            engine = config.engine
            folder = await asyncio.to_thread(
                resolve,
                engine.model,
                revision=engine.model_revision,
                model_impl=engine.model_impl,
            )
            model = folder.name  # the model's name in the routers' API
        return cls(config, model)

    def __init__(self, config: WorkerConfig, model: str) -> None:
        options = config.events
        self._topic = f"kv@{config.worker_id}@{model}".encode()
        self._told = ToldBlocks(config.engine.block_size)
        self._numbers = count()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._publish = self._context.socket(zmq.PUB)
        try:
            self._open(options.kv_events, options.kv_events_replay)
        except ConfigError:
            self._close()
            raise
        self._send([AllBlocksCleared()])

    def on_report(self, step: StepReport) -> None:
        """Publishes the blocks that a step stored and removed."""
        if events := self._told.take(step):
            self._send(events)

    async def aclose(self) -> None:
        """Closes the sockets. Queued messages are sent for up to one second."""
        if self._task is not None:
            await cancel(self._task)
        await asyncio.to_thread(self._close, 1000)

    def _open(self, endpoint: str, replay: str) -> None:
        self._publish.set_hwm(_QUEUE_MAX)
        # As in vLLM, the socket binds to a wildcard or a path. At any other address, the subscriber
        # listens and the socket connects.
        listens = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        _use(self._publish, "--kv-events", endpoint, listens=listens)
        if replay:
            self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
            # With this option a full queue blocks instead of dropping messages.
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            _use(self._replay, "--kv-events-replay", replay, listens=True)
            self._task = asyncio.create_task(self._serve_replays(self._replay), name="kv-replay")
        log.info("publishing KV events of topic %s at %s", self._topic.decode(), endpoint)

    def _close(self, linger_ms: int = 0) -> None:
        self._publish.close(linger=linger_ms)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _send(self, events: list[Event]) -> None:
        number = next(self._numbers)
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events))
        self._publish.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
        if self._replay is not None:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while self._kept_bytes > _KEPT_BYTES_MAX:
                self._kept_bytes -= len(self._kept.popleft()[1])

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            client, *question = await socket.recv_multipart()
            if len(question) != 2 or len(question[1]) != 8:
                log.warning(
                    "a subscriber's request for past KV events is ignored: it must be a sequence "
                    "number of 8 bytes"
                )
                continue
            first = int.from_bytes(question[1], "big")
            kept = [(n.to_bytes(8, "big"), payload) for n, payload in self._kept if n >= first]
            try:
                for number, payload in (*kept, (_END, b"")):
                    async with asyncio.timeout(_REPLAY_DEADLINE_S):
                        await socket.send_multipart([client, b"", number, payload])
                    await asyncio.sleep(0)
            except (TimeoutError, zmq.ZMQError) as error:
                log.warning(
                    "a subscriber requested past KV events, but did not read them: %r", error
                )


def _lora_id(adapter: Adapter) -> int:
    """Returns a positive 31-bit number from the adapter's digest, the same on every worker.

    If an adapter's files change under the same name, its number changes, too.
    """
    return int(adapter.digest[:8], 16) % (1 << 31) or 1


def _use(socket: Any, option: str, endpoint: str, *, listens: bool) -> None:
    try:
        (socket.bind if listens else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{option} {endpoint} cannot be used: {error}") from error
