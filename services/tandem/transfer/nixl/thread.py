"""The transfer thread of an engine process, the only thread that uses NIXL.

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

The thread polls NIXL at least once per millisecond while a pull is unfinished. Otherwise it sleeps
until a command arrives. This module knows no asyncio, tensors or engine. For this module, the KV
pool is an address and a size.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tandem.common.config.transfer import TransferConfig
from tandem.errors import InternalError, TandemError
from tandem.transfer.nixl import messages
from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.consumer import NixlConsumer
from tandem.transfer.nixl.producer import readable_agent
from tandem.transfer.nixl.reach import host_identity

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
    ) -> None:
        """`on_event` is called in the transfer thread with each event, and must be quick.

        `on_start` is called in the transfer thread before anything else. `finish_copies` is called
        in it after an agent was destroyed, and waits for the copies that the pool's device has
        queued.
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
        self._transport = NixlConsumer(
            pool,
            f"{agent_name}-consumer",
            mode=self._mode,
            quarantine_blocks_max=config.quarantine_blocks_max,
            delay_s=config.delay_s,
            finish_copies=finish_copies,
        )
        self._producer: NixlAgent | None = None
        self._num_probes = 0
        self._probes: dict[str, _Probing] = {}  # pull id of a test read -> peer under test
        self._under_way: set[str] = set()
        # Number of times that the consumer's agent was replaced, as reported in `Renewed` events.
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

    def connect(self, peer_id: str, metadata: bytes, pool: messages.RemotePool) -> None:
        """Connects a peer and tests the connection with reads into scratch memory.

        One `PeerConnected` event reports the result.
        """
        self._enqueue(lambda: self._connect(peer_id, metadata, pool))

    def disconnect(self, peer_id: str) -> None:
        self._enqueue(lambda: self._transport.disconnect(peer_id))

    def submit(self, pull: messages.Pull) -> None:
        """Submits a pull. Exactly one `Settled` event reports the result."""
        self._enqueue(lambda: self._submit(pull))

    def cancel(self, pull_id: str) -> None:
        """Cancels a pull. The pull ends FAILED unless it has already ended."""
        self._enqueue(lambda: self._transport.cancel(pull_id))

    def producer(self, request_id: int) -> None:
        """Requests the metadata and pool description with which peers can read this process's pool.

        One `ProducerReady` event with the same `request_id` has the result.
        """
        self._enqueue(lambda: self._describe_producer(request_id))

    def _enqueue(self, command: Callable[[], None]) -> None:
        if self._commands.qsize() >= COMMANDS_MAX:
            raise InternalError(
                f"{COMMANDS_MAX} commands wait for the transfer thread, which is the limit"
            )
        self._commands.put(command)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                log.exception("the transfer thread is broken")
                self._break(f"the transfer thread is broken: {error!r}")

    def _turn(self) -> None:
        wait_s = None if self._failure else self._transport.wait_s()
        try:
            self._commands.get(block=wait_s != 0, timeout=wait_s)()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()
        except Empty:
            pass
        if not self._failure:
            self._report()

    def _report(self) -> None:
        for result in self._transport.poll():
            if result.pull_id in self._probes:
                self._answer_probe(result)
            else:
                self._settle(result)
        if block_ids := self._transport.unfenced():
            self._on_event(messages.Unfenced(block_ids))
        if num_times := self._transport.num_renewals - self._num_renewals:
            self._num_renewals += num_times
            self._on_event(messages.Renewed(num_times))
        if failure := self._transport.failure():
            self._report_broken(failure)

    def _settle(self, result: messages.PullResult) -> None:
        self._under_way.discard(result.pull_id)
        self._on_event(messages.Settled(result))

    def _answer_probe(self, result: messages.PullResult) -> None:
        probing = self._probes.pop(result.pull_id)
        probing.reads.append((result.num_bytes, result.elapsed_s))
        if result.done and probing.next_blocks():
            self._probe(probing)
            return
        peer_id = probing.peer_id
        if not result.done and all(p.peer_id != peer_id for p in self._probes.values()):
            self._transport.disconnect(peer_id)
        reads = tuple(probing.reads[1:]) if result.done else ()
        self._on_event(messages.PeerConnected(peer_id, result.error, reads))

    def _connect(self, peer_id: str, metadata: bytes, pool: messages.RemotePool) -> None:
        if self._failure:
            self._on_event(messages.PeerConnected(peer_id, self._failure))
            return
        try:
            self._transport.connect(peer_id, metadata, pool)
        except TandemError as error:
            self._on_event(messages.PeerConnected(peer_id, error.message))
            return
        self._probe(_Probing(peer_id))

    def _probe(self, probing: _Probing) -> None:
        self._num_probes += 1
        pull_id = f"probe/{self._num_probes}"
        self._probes[pull_id] = probing
        self._transport.probe(
            pull_id, probing.peer_id, probing.next_blocks(), self._config.connect_deadline_s
        )

    def _submit(self, pull: messages.Pull) -> None:
        if self._failure:
            self._settle(
                messages.PullResult(pull.pull_id, False, error=self._failure, reason="broken")
            )
            self._on_event(messages.Unfenced(pull.local_block_ids))  # no read was started
            return
        self._under_way.add(pull.pull_id)
        self._transport.submit(pull)

    def _describe_producer(self, request_id: int) -> None:
        pool = self._pool.remote()
        try:
            if self._producer is None:
                name = f"{self._agent_name}-producer"
                self._producer = readable_agent(self._pool, name, self._mode)
            metadata = self._producer.metadata()
        except TandemError as error:
            self._on_event(messages.ProducerReady(request_id, b"", pool, error.message))
            return
        self._on_event(messages.ProducerReady(request_id, metadata, pool))

    def _stop(self) -> None:
        self._stopping = True
        if not self._failure:
            self._transport.close()
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
