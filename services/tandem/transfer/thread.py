"""The transfer thread of an engine process, the only thread that uses NIXL and CUDA IPC.

The engine's main thread sends commands to this thread through a queue of limited length. This
thread reports events by a callback. NIXL needs a thread of its own, because NIXL is not thread-safe
and copies blocks inside its calls.

    state before   event             state after
    new            `start`           running
    running        `stop`            stopped. Every unfinished pull has ended FAILED.
    running        a bug             broken
    broken         `stop`            stopped

In the state `broken`, the thread answers each command with an error, and fenced blocks stay fenced.
The event `Broken` is sent once, after a bug or if no new agent can be created. The worker then
drains itself and is restarted.

The thread polls the agents at least once per millisecond while a pull is unfinished. Otherwise it
sleeps until a command arrives. This module knows no asyncio, tensors or engine. For this module,
the KV pool is an address and a size.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tandem.common.config.transfer import TransferConfig
from tandem.errors import InternalError, TandemError
from tandem.transfer.cuda_ipc.agent import CudaIpcAgent, IpcDevice
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.producer import readable_agent
from tandem.transfer.nixl.reach import host_identity
from tandem.transfer.nixl.ucx_mode import UcxMode
from tandem.transfer.reads import messages
from tandem.transfer.reads.block_reader import POLL_S_MIN, BlockReader
from tandem.transfer.reads.piece_size import CUDA_IPC_BYTES, FIRST_BYTES, device_bytes

log = logging.getLogger(__name__)

COMMANDS_MAX = 4096
STOP_DEADLINE_S = 5.0
# Largest number of reads that test a new peer. The first read also opens the connection, so its
# duration is not used.
_PROBES = 4
# Wanted duration of a test read in seconds. The second test read has one block. If the second test
# read takes 1 ms, the remaining test reads have 250 blocks each.
_PROBE_S = 0.25


@dataclass(slots=True)
class _Probing:
    """A peer under test, with the (bytes, seconds) of each test read that has ended."""

    peer_id: str
    transport: str
    reads: list[tuple[int, float]] = field(default_factory=list)

    def next_blocks(self) -> int:
        """Returns the number of blocks of the next test read, or 0 if the test is complete.

        The consumer reads fewer blocks if these blocks do not fit into the scratch memory.
        """
        if len(self.reads) < 2:
            return 1
        num_blocks = int(_PROBE_S / max(1e-6, self.reads[1][1]))
        return num_blocks if len(self.reads) < _PROBES and num_blocks > 1 else 0


def _nothing() -> None:
    pass


class TransferThread:
    """Reads blocks in a thread of its own. Only one other thread at a time may call the methods."""

    def __init__(
        self,
        pool: messages.LocalPool,
        config: TransferConfig,
        agent_name: str,
        on_event: Callable[[messages.TransferEvent], None],
        on_start: Callable[[], None] | None = None,
        finish_copies: Callable[[], object] = _nothing,
        ipc_device: IpcDevice | None = None,
    ) -> None:
        """`on_event` is called in the transfer thread with each event, and must be quick.

        `on_start` is called in the transfer thread before anything else. `finish_copies` is called
        in it after a NIXL agent was destroyed, and waits for the copies that the pool's device has
        queued. `ipc_device` is the pool's device if other processes can map its memory.
        """
        self._pool = pool
        self._config = config
        self._agent_name = agent_name
        self._on_event = on_event
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        if on_start is not None:
            self._commands.put(on_start)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._mode = host_identity(config.nixl_tcp).mode
        self._ipc_device = ipc_device if config.transport in ("auto", "cuda_ipc") else None
        # Transport -> reader of peers' blocks. A reader creates its agent when it is first used.
        self._readers = {
            "nixl": BlockReader(
                pool,
                self._nixl_agent,
                quarantine_blocks_max=config.quarantine_blocks_max,
                first_piece_bytes=_nixl_piece_bytes(pool, self._mode, config.quarantine_blocks_max),
                delay_s=config.delay_s,
                finish_copies=finish_copies,
            )
        }
        if (device := self._ipc_device) is not None:
            self._readers["cuda_ipc"] = BlockReader(
                pool,
                lambda number: CudaIpcAgent(device),
                quarantine_blocks_max=config.quarantine_blocks_max,
                first_piece_bytes=CUDA_IPC_BYTES,
                poll_s_max=POLL_S_MIN,  # most copies take less than a millisecond
                delay_s=config.delay_s,
            )
        self._producer: NixlAgent | None = None
        self._num_probes = 0
        self._probes: dict[str, _Probing] = {}  # pull id of a test read -> peer under test
        self._under_way: set[str] = set()
        # Number of times that a reader's agent was replaced, as reported in `Renewed` events.
        self._num_renewals = 0
        self._failure = ""
        self._reported_broken = False
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all pulls, destroys the agents and stops the thread.

        Raises InternalError if the thread does not stop within STOP_DEADLINE_S seconds.
        """
        self._enqueue(self._stop)
        self._thread.join(STOP_DEADLINE_S)
        if self._thread.is_alive():
            raise InternalError(f"the transfer thread did not stop in {STOP_DEADLINE_S:g} s")

    def connect(
        self, peer_id: str, ranks: Sequence[messages.PeerRank], transport: str = "nixl"
    ) -> None:
        """Connects a peer over a transport, "nixl" or "cuda_ipc", and tests the connection with
        reads into scratch memory. `ranks` has the peer's ranks in order.

        One `PeerConnected` event reports the result.
        """
        self._enqueue(lambda: self._connect(peer_id, ranks, transport))

    def disconnect(self, peer_id: str, transport: str = "nixl") -> None:
        self._enqueue(lambda: self._disconnect(peer_id, transport))

    def submit(self, pull: messages.Pull) -> None:
        """Submits a pull. Exactly one `Settled` event reports the result."""
        self._enqueue(lambda: self._submit(pull))

    def cancel(self, pull_id: str) -> None:
        """Cancels a pull. The pull ends FAILED unless it has already ended."""
        self._enqueue(lambda: self._cancel(pull_id))

    def producer(self, request_id: int) -> None:
        """Requests the metadata and pool description with which peers can read this process's pool.

        One `ProducerReady` event with the same `request_id` has the result.
        """
        self._enqueue(lambda: self._describe_producer(request_id))

    def _enqueue(self, command: Callable[[], None]) -> None:
        if self._commands.qsize() >= COMMANDS_MAX:
            raise InternalError(
                f"a command is refused: {COMMANDS_MAX} commands already wait for the transfer "
                "thread, and no more may wait"
            )
        self._commands.put(command)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                log.exception(
                    "the transfer thread failed and reads no more KV blocks; this worker drains "
                    "and ends"
                )
                self._break(f"the transfer thread is broken: {error!r}")

    def _turn(self) -> None:
        wait_s = None if self._failure else self._wait_s()
        try:
            self._commands.get(block=wait_s != 0, timeout=wait_s)()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()
        except Empty:
            pass
        if not self._failure:
            self._report()

    def _wait_s(self) -> float | None:
        waits = [wait_s for each in self._readers.values() if (wait_s := each.wait_s()) is not None]
        return min(waits, default=None)

    def _report(self) -> None:
        for reader in self._readers.values():
            for result in reader.poll():
                if result.pull_id in self._probes:
                    self._answer_probe(result)
                else:
                    self._settle(result)
            if block_ids := reader.unfenced():
                self._on_event(messages.Unfenced(block_ids))
            if failure := reader.failure():
                self._report_broken(failure)
        num_renewals = sum(reader.num_renewals for reader in self._readers.values())
        if num_times := num_renewals - self._num_renewals:
            self._num_renewals = num_renewals
            self._on_event(messages.Renewed(num_times))

    def _settle(self, result: messages.PullResult) -> None:
        self._under_way.discard(result.pull_id)
        self._on_event(messages.Settled(result))

    def _answer_probe(self, result: messages.PullResult) -> None:
        probing = self._probes.pop(result.pull_id)
        probing.reads.append((result.num_bytes, result.elapsed_s))
        if result.done and probing.next_blocks():
            self._probe(probing)
            return
        peer_id, transport = probing.peer_id, probing.transport
        others = ((each.peer_id, each.transport) for each in self._probes.values())
        if not result.done and (peer_id, transport) not in others:
            self._readers[transport].disconnect(peer_id)
        reads = tuple(probing.reads[1:]) if result.done else ()
        self._on_event(messages.PeerConnected(peer_id, result.error, reads, transport))

    def _connect(self, peer_id: str, ranks: Sequence[messages.PeerRank], transport: str) -> None:
        error = self._why_not(transport)
        if not error:
            try:
                self._readers[transport].connect(peer_id, ranks)
            except TandemError as raised:
                error = raised.message
        if error:
            self._on_event(messages.PeerConnected(peer_id, error, transport=transport))
        else:
            self._probe(_Probing(peer_id, transport))

    def _disconnect(self, peer_id: str, transport: str) -> None:
        if (reader := self._readers.get(transport)) is not None:
            reader.disconnect(peer_id)

    def _cancel(self, pull_id: str) -> None:
        for reader in self._readers.values():
            reader.cancel(pull_id)

    def _why_not(self, transport: str) -> str:
        """Returns why nothing can be read over a transport; "" if reads are possible."""
        if transport in self._readers:
            return self._failure
        return self._failure or f"the engine process does not use the transport {transport}"

    def _probe(self, probing: _Probing) -> None:
        self._num_probes += 1
        pull_id = f"probe/{self._num_probes}"
        self._probes[pull_id] = probing
        self._readers[probing.transport].probe(
            pull_id, probing.peer_id, probing.next_blocks(), self._config.connect_deadline_s
        )

    def _submit(self, pull: messages.Pull) -> None:
        if error := self._why_not(pull.transport):
            self._settle(messages.PullResult(pull.pull_id, False, error=error, reason="broken"))
            self._on_event(messages.Unfenced(pull.local_block_ids))  # no read was started
            return
        self._under_way.add(pull.pull_id)
        self._readers[pull.transport].submit(pull)

    def _describe_producer(self, request_id: int) -> None:
        metadata = cuda_ipc = b""
        error = cuda_ipc_error = ""
        if self._ipc_device is not None:
            try:
                cuda_ipc = self._ipc_device.export(self._pool.address)
            except TandemError as raised:
                cuda_ipc_error = raised.message
        if self._serves_nixl:
            try:
                if self._producer is None:
                    name = f"{self._agent_name}-producer"
                    self._producer = readable_agent(
                        self._pool, name, self._mode, with_cuda_ipc=self._ucx_uses_cuda_ipc
                    )
                metadata = self._producer.metadata()
            except TandemError as raised:
                error = raised.message
        ready = messages.ProducerReady(
            request_id, metadata, self._pool.remote(), error, cuda_ipc, cuda_ipc_error
        )
        self._on_event(ready)

    @property
    def _ucx_uses_cuda_ipc(self) -> bool:
        """False if this process itself reads GPUs of this machine. UCX would map the pool of each
        peer as well, and unmap the pool of a killed peer only when this process ends."""
        return self._ipc_device is None

    @property
    def _serves_nixl(self) -> bool:
        """False if NIXL could only do what this process does itself: read GPUs of this machine."""
        if self._config.transport == "cuda_ipc":
            return False
        return self._ipc_device is None or self._mode in (UcxMode.RDMA, UcxMode.TCP)

    def _nixl_agent(self, number: int) -> NixlAgent:
        """Creates the NIXL agent of the consumer."""
        return NixlAgent(
            f"{self._agent_name}-consumer-{number}",
            mode=self._mode,
            progress_delay_us=None,
            memory=self._pool.memory,
            with_cuda_ipc=self._ucx_uses_cuda_ipc,
        )

    def _stop(self) -> None:
        self._stopping = True
        if not self._failure:
            for reader in self._readers.values():
                reader.close()
        if self._producer is not None:
            self._producer.close()

    def _break(self, message: str) -> None:
        """Enters the state `broken` after a bug, and fails all pulls.

        No `Unfenced` event follows for the blocks of these pulls, because some of their reads may
        still write.
        """
        self._failure = message
        for pull_id in list(self._under_way):
            self._settle(messages.PullResult(pull_id, False, error=message, reason="broken"))
        for pull_id, probing in list(self._probes.items()):
            del self._probes[pull_id]
            self._on_event(messages.PeerConnected(probing.peer_id, message))
        self._report_broken(message)

    def _report_broken(self, message: str) -> None:
        if not self._reported_broken:
            self._reported_broken = True
            self._on_event(messages.Broken(message))


def _nixl_piece_bytes(
    pool: messages.LocalPool, mode: UcxMode | None, quarantine_blocks_max: int
) -> int:
    """Returns the initial size of a piece over NIXL."""
    if pool.memory != "VRAM" or mode is not UcxMode.MEMORY:
        return FIRST_BYTES
    block_bytes = pool.num_bytes // pool.layout.spans.num_blocks
    return device_bytes(block_bytes=block_bytes, quarantine_blocks_max=quarantine_blocks_max)
