"""The engine process of a worker: the step loop, the KV pool and, in its own thread, transfers.

It knows no gRPC, no Redis and no asyncio. It talks to the I/O process over two ZeroMQ sockets:

    socket     type  messages
    commands   PAIR  from the I/O process: `Command`s
                     to the I/O process: at most one `Report` per turn of the loop, and
                     `BlocksFinal` during a step
    transfers  PUSH  to the I/O process, from the transfer thread at any time: `PullsSettled`,
                     `PeerConnected` and others

A turn applies the waiting messages, computes one step if there is work, and reports. Without work
the loop sleeps in `poll`. The thread of a tier wakes the loop when one of its jobs ends. While the
engine has a sequence, the loop turns at least every `TICK_S`, so that a consumer can distinguish a
busy or idle engine from one that hangs.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from tandem.common.process.garbage import exempt_loaded
from tandem.engine.cache.layout.pool_bytes import pool_bytes
from tandem.engine.cache.layout.pool_memory import populate
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.vision_tower import make_image_rows
from tandem.engine.tiers.io_thread import IoThread
from tandem.engine.types import Failed, StepReport
from tandem.errors import ConfigError, InternalError, TandemError, WorkerLost
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.source import resolve
from tandem.net.observability.logs import about, configure_logging
from tandem.transfer.ranks import RankTransfers
from tandem.transfer.reads import messages as transfer
from tandem.transfer.reads.messages import PullResult
from tandem.transfer.thread import TransferThread
from tandem.worker.engine_process import messages
from tandem.worker.engine_process.pool_transfers import PoolTransfers, serve_rank
from tandem.worker.engine_process.pull_ledger import PullLedger
from tandem.worker.engine_process.requested_images import RequestedImages

log = logging.getLogger(__name__)

TICK_S = 0.25
# Seconds between two turns of the loop while a thread compiles a grammar or reads an adapter. The
# interval is short, because the loop notices only at a turn that the thread has ended.
GRAMMAR_TICK_S = 0.002
_IDLE_S = 3600.0
_COMMANDS_PER_TURN_MAX = 1024
_PR_SET_PDEATHSIG = 1
_decoder: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)


class EngineProcess:
    """Applies commands to the engine and the transfer thread, and runs steps."""

    def __init__(self, settings: messages.EngineSettings) -> None:
        load_ms: dict[str, float] = {}
        self._tier_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._requested = RequestedImages(self._send)
        self._runner, self._engine, fingerprint = self._load(settings, load_ms)
        on_cpu = self._runner.kv.device.type == "cpu"
        has_one_pool = self._runner.num_pools == 1
        self._pool_is_shared = on_cpu and has_one_pool and settings.pool_fd is not None
        self._bytes = (
            pool_bytes(self._runner.kv, self._engine.layout)
            if has_one_pool
            else self._runner.blocks
        )
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PAIR)
        self._commands.connect(settings.commands_address)
        self._transfers_address = settings.transfers_address
        # created by `_on_transfer_event`, because a ZeroMQ socket belongs to one thread
        self._transfers: Any = None
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind("inproc://settled")
        self._wake_sender: Any = None
        self._settled: SimpleQueue[transfer.Settled | transfer.Unfenced] = SimpleQueue()
        self._ledger = PullLedger()
        self._transfer = self._make_transfers(settings)
        self._tick = 0
        self._num_commands = 0  # number of applied commands
        self._failed: list[Failed] = []
        self._stopping = False
        self._send(self._ready(fingerprint, load_ms))
        if on_cpu:
            populate(self._runner.kv.data_ptr(), self._runner.kv.nbytes)
        exempt_loaded()

    def _load(
        self, settings: messages.EngineSettings, load_ms: dict[str, float]
    ) -> tuple[ModelRunner, Engine, str]:
        """Returns the model runner, the engine and the model's fingerprint.

        Adds the duration of each phase to `load_ms`.
        """
        started = time.perf_counter()
        folder = resolve(
            settings.engine.model,
            revision=settings.engine.model_revision,
            model_impl=settings.engine.model_impl,
        )
        load_ms["resolve"] = _ms_since(started)
        started = time.perf_counter()
        with _telling(settings.transfers_address) as tell:
            runner = ModelRunner(
                folder,
                settings.engine,
                pool_fd=settings.pool_fd,
                on_progress=tell,
                on_rank_end=partial(_end_with_rank, settings.transfers_address),
                gpu_wait_s=settings.gpu_wait_s,
                rank_service=partial(serve_rank, settings.transfer, _agent_name(settings)),
            )
        load_ms["weights"] = _ms_since(started)
        started = time.perf_counter()
        compiler = GrammarCompiler.of(folder)
        start_thread = partial(IoThread, on_job_end=partial(os.eventfd_write, self._tier_wake, 1))
        self._requested.hidden_size = folder.config.hidden_size
        images = make_image_rows(folder, runner, settings.engine, self._requested.fetch)
        engine = Engine(settings.engine, runner, folder.fingerprint, compiler, start_thread, images)
        load_ms["kv_pool"] = _ms_since(started)
        return runner, engine, folder.fingerprint

    def run(self) -> None:
        """Runs turns until `Shutdown` arrives or the I/O process dies."""
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._tier_wake, zmq.POLLIN)
        self._transfer.start()
        try:
            while not self._stopping:
                poller.poll(round(self._wait_ms()))
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._tier_wake)
                self._tick += 1
                self._apply_transfer_events()
                self._apply_commands()
                self._turn()
        finally:
            self._transfer.stop()
            self._engine.close()

    def _wait_ms(self) -> float:
        if self._engine.has_work():
            return 0
        if self._engine.awaits_silent_threads():
            return GRAMMAR_TICK_S * 1000
        load = self._engine.load()
        return (TICK_S if load.num_requests or load.blocks_quarantined else _IDLE_S) * 1000

    def _turn(self) -> None:
        if self._engine.has_work():
            report = self._engine.step(lambda final: self._send(messages.BlocksFinal(final)))
        else:
            report = StepReport(load=self._engine.load(), stats=self._engine.stats())
        report.failed = [*self._failed, *report.failed]
        self._failed = []
        self._send(messages.Report(self._tick, report, self._num_commands))

    def _apply_commands(self) -> None:
        for _ in range(_COMMANDS_PER_TURN_MAX):
            try:
                frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = _decoder.decode(frames[0])
            self._num_commands += 1
            if log.isEnabledFor(logging.DEBUG) and (sequence_id := messages.sequence_id(command)):
                name = type(command).__name__
                log.debug("%s %s", name, sequence_id, extra=about(sequence_id))
            try:
                self._apply(command, frames)
            except TandemError as error:
                self._refuse(command, error)

    def _apply(self, command: messages.Command, frames: list[bytes]) -> None:
        if isinstance(command, messages.ENDS_OF_PULLS):
            # A pull of the same sequence may have just ended, so the ledger is updated first.
            self._apply_transfer_events()
        match command:
            case messages.Add(spec):
                self._engine.add(spec)
            case messages.StartLocalPrefill(sequence_id):
                self._engine.start_local_prefill(sequence_id)
            case messages.Restart(spec):
                self._engine.restart(spec, self._give_up(spec.sequence_id))
            case messages.Commit(sequence_id, first_token_id, block_sums):
                self._engine.commit(sequence_id, first_token_id, block_sums)
            case messages.ContinuePrefill(sequence_id, num_blocks):
                unsafe = self._give_up(sequence_id)
                self._engine.continue_prefill(sequence_id, num_blocks, unsafe)
            case messages.HoldPrefix(sequence_id, block_hashes, first_wanted_block, load_s_max):
                self._engine.hold_prefix(sequence_id, block_hashes, first_wanted_block, load_s_max)
            case messages.ImportBlocks(sequence_id, block_hashes):
                self._engine.import_blocks(sequence_id, block_hashes)
            case messages.CommitImport(sequence_id, num_blocks):
                unsafe = self._give_up(sequence_id)
                self._engine.commit_import(sequence_id, num_blocks, unsafe)
            case messages.ListChains(request_id, blocks_max):
                chains = self._engine.hot_prefixes(blocks_max)
                self._send(messages.Chains(request_id, chains))
            case messages.ListBlocks(request_id, first, end, tier):
                hashes = (
                    self._engine.tier_block_hashes(tier, first, end)
                    if tier
                    else self._engine.block_hashes(first, end)
                )
                self._send(messages.Blocks(request_id, hashes))
            case messages.ResetPrefixCache(request_id):
                num_blocks = self._engine.reset_prefix_cache()
                self._send(messages.PrefixCacheReset(request_id, num_blocks))
            case messages.KeepChain(request_id, tenant, retention, block_hashes):
                kept = self._engine.kept.keep(tenant, retention, block_hashes)
                self._send(messages.ChainKept(request_id, kept))
            case messages.Remove(sequence_id):
                self._engine.remove(sequence_id, self._give_up(sequence_id))
            case messages.ReturnWaiting(sequence_ids, count):
                self._engine.return_waiting(sequence_ids, count)
            case messages.StartPull(sequence_id, pull):
                self._check_held(sequence_id, pull.local_block_ids)
                self._transfer.submit(pull)
                self._ledger.start(sequence_id, pull)
            case messages.StoreBytes(sequence_id, block_ids):
                self._check_held(sequence_id, block_ids)
                self._bytes.write(block_ids, frames[1])
            case messages.LoadBytes(request_id, sequence_id, block_ids):
                self._check_held(sequence_id, block_ids)
                self._send(messages.BlockData(request_id, ""), self._bytes.read(block_ids))
            case messages.StoreProbe():
                self._bytes.write_probe(frames[1])
            case messages.LoadProbe(request_id, num_bytes):
                self._send(messages.BlockData(request_id, ""), self._bytes.read_probe(num_bytes))
            case messages.ConnectPeer(peer_id, ranks, transport):
                self._transfer.connect(peer_id, ranks, transport)
            case messages.DisconnectPeer(peer_id, transport):
                self._transfer.disconnect(peer_id, transport)
            case messages.EncodePool(is_up):
                self._requested.has_encoders = is_up
            case messages.ImageEncoded():
                self._requested.take(command, frames)
            case messages.DescribeSource(request_id):
                self._transfer.producer(request_id)
            case messages.CheckIntegrity(request_id):
                self._send(messages.Integrity(request_id, self._integrity()))
            case messages.Shutdown():
                self._stopping = True

    def _refuse(self, command: messages.Command, error: TandemError) -> None:
        """Fails only the request whose command caused the error, and answers the command's
        sender.
        """
        name = type(command).__name__
        sequence_id = messages.sequence_id(command)
        log.warning(
            "the command %s of sequence %s failed: %s",
            name,
            sequence_id,
            error,
            extra=about(sequence_id),
        )
        match command:
            case messages.StartPull(_, pull):
                failed = PullResult(pull.pull_id, done=False, error=error.message)
                self._send(messages.PullsSettled([failed]))
            case messages.LoadBytes(request_id) | messages.LoadProbe(request_id):
                self._send(messages.BlockData(request_id, error.message))
            case _:
                after_s = error.retry_after_s or 0.0
                self._failed.append(Failed(sequence_id, error.code, error.message, after_s))

    def _give_up(self, sequence_id: str) -> list[int]:
        pull_ids, unsafe = self._ledger.give_up(sequence_id)
        for pull_id in pull_ids:
            self._transfer.cancel(pull_id)
        return unsafe

    def _check_held(self, sequence_id: str, block_ids: list[int]) -> None:
        """Raises InternalError if the sequence does not hold all of these blocks."""
        if not set(self._engine.block_ids(sequence_id)).issuperset(block_ids):
            raise InternalError(
                f"the pull writes into KV blocks that sequence {sequence_id} does not hold"
            )

    def _integrity(self) -> str:
        try:
            self._engine.check_integrity()
        except AssertionError as error:
            return str(error) or "an integrity check failed without a message"
        return ""

    def _on_transfer_event(self, event: transfer.TransferEvent) -> None:
        """Passes a transfer event to the engine's loop, the I/O process or both. Runs in the
        transfer thread, or in the one that merges the events of all ranks.
        """
        if self._transfers is None:
            self._transfers = self._context.socket(zmq.PUSH)
            self._transfers.connect(self._transfers_address)
            self._wake_sender = self._context.socket(zmq.PUSH)
            self._wake_sender.connect("inproc://settled")
        match event:
            case transfer.Settled(result):
                self._settled.put(event)
                self._transfers.send(msgspec.msgpack.encode(messages.PullsSettled([result])))
                self._wake_sender.send(b"")
            case transfer.Unfenced():
                self._settled.put(event)
                self._wake_sender.send(b"")
            case _:
                self._transfers.send(msgspec.msgpack.encode(event))

    def _apply_transfer_events(self) -> None:
        while self._wake.poll(0):
            self._wake.recv(zmq.NOBLOCK)
        while not self._settled.empty():  # no other thread reads this queue
            event = self._settled.get_nowait()
            if isinstance(event, transfer.Settled):
                safe = self._ledger.settled(event.result)
            else:
                safe = self._ledger.unfenced(event.block_ids)
            if safe:
                self._engine.unquarantine(safe)

    def _send(self, reply: messages.Reply, data: bytes | memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [msgspec.msgpack.encode(reply)]
        if data is not None:
            frames.append(data)
        self._commands.send_multipart(frames, copy=len(frames) == 1)

    def _make_transfers(self, settings: messages.EngineSettings) -> TransferThread | RankTransfers:
        pool = self._pool_transfers()
        make_thread = partial(pool.thread, settings.transfer, _agent_name(settings))
        if self._runner.num_pools == 1:
            return make_thread(self._on_transfer_event)
        return RankTransfers(make_thread, self._runner.service_pipes, self._on_transfer_event)

    def _pool_transfers(self) -> PoolTransfers:
        layout = self._engine.layout
        return PoolTransfers(self._runner.kv, layout, num_ranks=self._runner.num_pools)

    def _ready(self, fingerprint: str, load_ms: dict[str, float]) -> messages.Ready:
        layout = self._engine.layout
        return messages.Ready(
            model_fingerprint=fingerprint,
            compute_dtype=self._runner.dtype_name,
            numerics=self._runner.numerics_name,
            kv_dtype=self._runner.kv_dtype_name,
            layout=layout.describe(),
            num_blocks=layout.num_blocks,
            spans=layout.spans,
            max_model_len=self._engine.max_model_len,
            rates=self._engine.unmeasured_rates,
            load_ms=load_ms,
            kernels=self._runner.kernels_name,
            pool_is_shared=self._pool_is_shared,
        )


def _agent_name(settings: messages.EngineSettings) -> str:
    return f"{settings.worker_id}-{settings.epoch}"


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def main(kind: type[EngineProcess] = EngineProcess) -> None:
    """Runs the engine process, which only the I/O process starts."""
    given = sys.stdin.buffer.read()
    if not given:  # the I/O process has ended before it sent the settings
        raise SystemExit(1)
    settings = msgspec.json.decode(given, type=messages.EngineSettings)
    configure_logging(f"{settings.worker_id}/engine")
    _tie_to_parent(settings.parent_pid)
    if settings.cores:
        os.sched_setaffinity(0, set(settings.cores) & os.sched_getaffinity(0) or {0})
    try:
        kind(settings).run()
    except BaseException as error:
        # The I/O process logs the message of these errors in one line.
        if not isinstance(error, ConfigError | WorkerLost):
            log.exception("the engine process ends because of an error")
        if isinstance(error, TandemError):
            fatal = messages.Fatal(error.message, error.code)
        else:
            fatal = messages.Fatal(repr(error))
        _report_fatal(settings.transfers_address, fatal)
        raise SystemExit(1) from None


def _tie_to_parent(parent_pid: int) -> None:
    """Makes this process end with the I/O process, and ignores SIGINT and SIGTERM."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before prctl, perhaps during the import of torch, no SIGKILL comes.
    if os.getppid() != parent_pid:
        raise SystemExit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def _telling(address: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that reports (loaded, total) bytes of weights to the I/O process. The
    function uses a socket of its own, because the engine's sockets do not exist yet.
    """
    context: zmq.Context[Any] = zmq.Context.instance()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    try:
        yield lambda *loaded: socket.send(msgspec.msgpack.encode(messages.WeightsProgress(*loaded)))
    finally:
        socket.close(linger=1000)  # in the background; a small model is loaded before it connects


def _report_fatal(address: str, fatal: messages.Fatal) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    socket.send(msgspec.msgpack.encode(fatal))
    socket.close(linger=1000)
    context.term()  # returns when the message is sent, or after the linger time


def _end_with_rank(transfers_address: str, why: str) -> None:
    """Ends this process at once because another rank has ended. The step in progress would never
    finish, and its KV is wrong."""
    _report_fatal(transfers_address, messages.Fatal(why))
    os._exit(1)


if __name__ == "__main__":
    main()
