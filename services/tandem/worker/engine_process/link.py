"""The I/O process's link to the engine process: starts it, exchanges messages, detects its end.

The engine process sends answers and events. An answer, for example the bytes of blocks, is returned
by the method that sent the request. Events are step reports, final blocks and ended pulls, which
are passed to the function `on_event`.
"""

import asyncio
import itertools
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq.asyncio

from tandem.common.config.worker import WorkerConfig
from tandem.common.process.endings import describe_exit, oom_kills
from tandem.common.process.ticks import until_tick_s
from tandem.common.retention import Kept, Retention
from tandem.engine.cache.layout.block_spans import BlockSpans
from tandem.engine.cache.layout.pool_memory import map_shared
from tandem.errors import ConfigError, Incompatible, InternalError, WorkerLost, from_code
from tandem.net.observability.logs import STACKS_SIGNAL
from tandem.net.socket_folder import make_socket_folder
from tandem.transfer.grpc.reservations import (
    ENGINE_MESSAGE_BYTES,
    Blocks,
    PoolReservation,
    PoolView,
    Reservations,
)
from tandem.transfer.protocol import BlockPull
from tandem.transfer.reads import messages as transfer
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.pool_view import MappedPool, targets
from tandem.worker.engine_process.program import EngineProgram, start_program

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 30.0  # longest wait for an answer, which the engine sends between two steps
_STOP_DEADLINE_S = 5.0
_LOOK_S = 2.0
_replies: msgspec.msgpack.Decoder[messages.Reply] = msgspec.msgpack.Decoder(messages.Reply)


class EngineLink:
    """The link to one engine process. `on_event` is called on the event loop."""

    pool: PoolView  # set by `start`

    def __init__(
        self,
        config: WorkerConfig,
        epoch: str,
        on_event: Callable[[messages.Event], None] = lambda event: None,
        program: EngineProgram | None = None,
    ) -> None:
        """`program` is an engine process that runs already. If it is None, `start` starts one."""
        self._config = config
        self._epoch = epoch
        self._program = program
        self._on_event = on_event
        self.num_reports = 0
        # Number of commands sent so far. Each report says how many of them the engine has applied.
        self.num_sent = 0
        self.loading = (
            0,
            0,
        )  # during `start`: (bytes of weights loaded so far, bytes of all weights)
        self.is_awaited = False  # True: a command was sent after the last report arrived
        self.reservations = Reservations()
        self._pulls: dict[str, asyncio.Future[transfer.PullResult]] = {}
        self._answers: dict[object, asyncio.Future[Any]] = {}
        self._request_ids = itertools.count(1)
        self._folder = make_socket_folder()  # mode 700, so that only this user can connect
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PAIR)
        self._transfers = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._transfers):
            socket.setsockopt(zmq.LINGER, 0)
        self._process = program.process if program else None
        self._has_settings = False
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> messages.Ready:
        """Starts the process and waits until its model is loaded, at most `start_deadline_s`.

        Raises WorkerLost after that time or if the process ends. Raises ConfigError if the process
        rejects its settings.
        """
        commands, transfers = (f"ipc://{self._folder}/{n}" for n in ("commands", "transfers"))
        self._commands.bind(commands)
        self._transfers.bind(transfers)
        program = self._program or await start_program()
        self._process = process = program.process
        pool_fd = program.pool_fd
        settings = messages.EngineSettings(
            worker_id=self._config.worker_id,
            epoch=self._epoch,
            engine=replace(
                self._config.engine,
                report_block_tokens=bool(self._config.events.kv_events),
                rank_stopped_s_max=self._config.engine_hang_timeout_s,
            ),
            transfer=self._config.transfer,
            commands_address=commands,
            transfers_address=transfers,
            cores=list(self._config.cores),
            parent_pid=os.getpid(),
            pool_fd=pool_fd,
            gpu_wait_s=self._config.engine_hang_timeout_s,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        self._has_settings = True
        ready = self._question("ready")
        self._tasks = [
            asyncio.create_task(self._read(self._commands)),
            asyncio.create_task(self._read(self._transfers)),
            asyncio.create_task(self._watch(process)),
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)
        deadline_s = self._config.start_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                found: messages.Ready = await ready  # raises WorkerLost if the engine has ended
        except TimeoutError:
            self.tell_stacks()
            raise WorkerLost(
                f"the engine did not load its model within {deadline_s:g} s; if the model needs "
                "more time, raise --start-deadline"
            ) from None
        self._map_pool(found, pool_fd)
        return found

    async def ended(self) -> str:
        """Waits until the engine process has ended; returns the reason."""
        return await asyncio.shield(self._ended)

    def _map_pool(self, ready: messages.Ready, pool_fd: int | None) -> None:
        if pool_fd is not None and ready.pool_is_shared:
            memory = map_shared(pool_fd, ready.spans.memory_bytes)
            self.pool = MappedPool(memory, ready.spans)
            return
        if pool_fd is not None:
            os.close(pool_fd)
        self.pool = PoolThroughEngine(self, ready.spans)

    def send(self, command: messages.Command, data: bytes | memoryview | None = None) -> None:
        """Queues a command. Commands are applied in the order in which they were sent.

        After `stop` a command is ignored, so clean-up code may still send one.
        """
        if self._commands.closed:
            return
        frames: list[Any] = [msgspec.msgpack.encode(command)]
        if data is not None:
            frames.append(data)
        self.is_awaited = True
        self.num_sent += 1
        if isinstance(command, messages.ENDS_OF_PULLS):
            self.reservations.end(messages.sequence_id(command))
        # A PAIR socket queues a thousand messages, and the engine empties the queue every turn. So
        # the socket normally takes the message at once.
        sending: Any = self._commands.send_multipart(frames, copy=data is None)
        if sending.done():
            self._on_sent(sending)
        else:
            sending.add_done_callback(self._on_sent)

    def pull(
        self, peer_id: str, pull: BlockPull, transport: str
    ) -> asyncio.Future[transfer.PullResult]:
        """Starts a pull over NIXL or CUDA IPC. The future's result is the result of the pull."""
        future: asyncio.Future[transfer.PullResult] = asyncio.get_running_loop().create_future()
        pull_id = uuid.uuid4().hex
        self._pulls[pull_id] = future
        producer_ids = list(pull.producer_block_ids)
        local_ids = list(pull.local_block_ids)
        read = transfer.Pull(pull_id, peer_id, producer_ids, local_ids, pull.deadline_s, transport)
        self.send(messages.StartPull(pull.sequence_id, read))
        return future

    async def connect_peer(
        self, peer_id: str, ranks: Sequence[transfer.PeerRank], transport: str
    ) -> list[tuple[int, float]]:
        """Connects a peer, whose ranks are given in order, over NIXL or CUDA IPC.

        Returns (bytes, seconds) of each of a few test reads. Raises Incompatible if the peer's
        pools cannot be read.
        """
        answer = self._question((transport, peer_id))
        self.send(messages.ConnectPeer(peer_id, list(ranks), transport))
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            reply: transfer.PeerConnected = await answer
        if reply.error:
            raise Incompatible(reply.error)
        return list(reply.reads)

    def disconnect_peer(self, peer_id: str, transport: str) -> None:
        self.send(messages.DisconnectPeer(peer_id, transport))

    async def describe_producer(self) -> transfer.ProducerReady:
        reply: transfer.ProducerReady = await self._ask(messages.DescribeSource)
        return reply

    async def load_bytes(self, sequence_id: str, block_ids: list[int]) -> memoryview:
        """Returns the bytes of blocks that a PREFILL_ONLY sequence holds.

        Raises InternalError if the sequence does not hold the blocks.
        """
        data: memoryview = await self._ask(messages.LoadBytes, sequence_id, block_ids)
        return data

    async def load_probe(self, num_bytes: int) -> memoryview:
        """Returns zero bytes that the engine process has copied from the pool's device."""
        data: memoryview = await self._ask(messages.LoadProbe, num_bytes)
        return data

    async def list_prefixes(self, blocks_max: int) -> list[list[bytes]]:
        """Returns the most recently used chains of block hashes, each from its first block on."""
        reply: messages.Chains = await self._ask(messages.ListChains, blocks_max)
        return reply.chains

    async def list_blocks(self, first: bytes, end: bytes, tier: str = "") -> list[bytes]:
        """Returns the block hashes in the pool or in a tier, from `first` up to, but not including,
        `end`.

        An empty `end` means up to the last hash.
        """
        reply: messages.Blocks = await self._ask(messages.ListBlocks, first, end, tier)
        return reply.hashes

    async def reset_prefix_cache(self) -> int:
        """Drops all cached blocks that no sequence uses; returns their number."""
        reply: messages.PrefixCacheReset = await self._ask(messages.ResetPrefixCache)
        return reply.num_blocks

    async def keep_chain(
        self, tenant: bytes, retention: Retention, block_hashes: list[bytes]
    ) -> Kept:
        """Pins those blocks of a chain that are cached, up to the tenant's limit."""
        reply: messages.ChainKept = await self._ask(
            messages.KeepChain, tenant, retention, block_hashes
        )
        return reply.kept

    async def check_integrity(self) -> str:
        """Returns "" if all pools are consistent, else a description of the fault."""
        reply: messages.Integrity = await self._ask(messages.CheckIntegrity)
        return reply.message

    def kill(self, reason: str) -> None:
        """Kills an engine that hangs; `ended` then returns `reason`."""
        self._end(reason)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def tell_stacks(self) -> None:
        """Makes an engine that hangs log the stacks of its threads."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(STACKS_SIGNAL)

    async def stop(self) -> None:
        """Shuts the engine down; kills it if it has not ended after a deadline."""
        if self._process is not None and self._process.returncode is None:
            if self._has_settings:
                self.send(messages.Shutdown())
            else:
                self._process.kill()
            try:
                async with asyncio.timeout(_STOP_DEADLINE_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        self._commands.close()
        self._transfers.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _ask(self, command: Callable[..., messages.Command], *arguments: object) -> Any:
        """Sends a command whose first field is a request id; returns the answer with that id."""
        request_id = next(self._request_ids)
        answer = self._question(request_id)
        self.send(command(request_id, *arguments))
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await answer

    def _question(self, key: object) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        return future

    def _answer(self, key: object, value: object) -> None:
        future = self._answers.pop(key, None)
        if future is not None and not future.done():
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            self._dispatch(_replies.decode(frames[0].buffer), frames)

    def _dispatch(self, reply: messages.Reply, frames: list[Any]) -> None:
        match reply:
            case messages.Report():
                self.num_reports += 1
                self.is_awaited = False
                self._on_event(reply)
            case messages.PullsSettled(results):
                for result in results:
                    future = self._pulls.pop(result.pull_id, None)
                    if future is not None and not future.done():
                        future.set_result(result)
                self._on_event(reply)
            case (
                messages.BlocksFinal()
                | messages.ImageWanted()
                | transfer.Renewed()
                | transfer.Broken()
            ):
                self._on_event(reply)
            case messages.WeightsProgress(num_bytes, num_bytes_all):
                self.loading = num_bytes, num_bytes_all
            case messages.Ready():
                self._answer("ready", reply)
            case transfer.PeerConnected():
                self._answer((reply.transport, reply.peer_id), reply)
            case messages.BlockData(request_id, error):
                self._answer(request_id, InternalError(error) if error else frames[1].buffer)
            case messages.Fatal(message, code):
                fatal = from_code(code, message)
                self._end(message, fatal if isinstance(fatal, ConfigError) else None)
            case _:
                self._answer(reply.request_id, reply)

    def _on_sent(self, sent: asyncio.Future[Any]) -> None:
        """Kills the engine if a command could not be sent to it.

        Without that command, the engine and this process would disagree about which sequence holds
        which blocks.
        """
        if not sent.cancelled() and (error := sent.exception()) is not None:
            self.kill(f"a command cannot be sent to the engine: {error!r}")

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "reading messages from the engine failed, so the worker cannot go on",
                exc_info=task.exception(),
            )
            self._end(f"reading messages from the engine failed: {task.exception()!r}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        kills = oom_kills()
        while True:
            try:
                async with asyncio.timeout(until_tick_s(_LOOK_S)):
                    status = await process.wait()
                break
            except TimeoutError:
                kills = oom_kills()
        await asyncio.sleep(0)  # lets `_read` receive the engine's last message first
        self._end(f"the engine process ended: {describe_exit(status, kills)}")

    def _end(self, reason: str, error: ConfigError | None = None) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
        for future in [*self._answers.values(), *self._pulls.values()]:
            if not future.done():
                future.set_exception(error or WorkerLost(reason))
        self._answers.clear()
        self._pulls.clear()


class PoolThroughEngine:
    """Reads and writes the pool by messages to the engine process. The engine process applies these
    messages and other commands in the order in which they were sent.
    """

    message_bytes = ENGINE_MESSAGE_BYTES

    def __init__(self, link: EngineLink, spans: BlockSpans) -> None:
        self._link = link
        self.spans = spans

    async def read(self, sequence_id: str, block_ids: Sequence[int]) -> Blocks:
        data = await self._link.load_bytes(sequence_id, list(block_ids))
        blocks = []
        at = 0
        for span in map(self.spans.span, block_ids):
            size = span.stop - span.start
            blocks.append(data[at : at + size])
            at += size
        return blocks

    def write(self, into: PoolReservation, first: int, data: memoryview) -> None:
        block_ids = list(targets(into, first, data, self.spans))
        self._link.send(messages.StoreBytes(into.sequence_id, block_ids), data)

    async def read_probe(self, num_bytes: int) -> memoryview:
        return await self._link.load_probe(num_bytes)

    def write_probe(self, data: memoryview) -> None:
        self._link.send(messages.StoreProbe(), data)
