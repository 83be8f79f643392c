"""One router's multiplexed `Decode` stream.

Updates are collected until gRPC can send another message. So one message has the results of an
engine step for all requests of the router. A router that reads slowly gets fewer, larger messages.
A router that stops reading is disconnected once `_UPDATES_MAX` updates are waiting.
"""

import asyncio
import logging
from collections import deque

from tandem.errors import TandemError, WorkerLost
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.transit import Transit

log = logging.getLogger(__name__)

_UPDATES_MAX = 1 << 16


class RouterStream:
    """The outgoing side of a router's stream.

    When the stream closes, the sequences in `sequence_ids` end.
    """

    def __init__(self, *, draining: bool = False) -> None:
        self.sequence_ids: set[str] = set()
        self.transit = Transit()
        self._updates: list[pb.SequenceUpdate] = []
        self._load: pb.WorkerLoad | None = None
        # For each submitted sequence that is missing in `_load`: the number of the engine command
        # that added the sequence.
        self._submits: deque[int] = deque()
        # Number of this router's sequences that `_load` includes. By this number, the router finds
        # the sequences that it submitted later, and adds them to the load.
        self._num_submits = 0
        self._changed = asyncio.Event()
        self._draining = draining
        self._closed = False
        # The router's call fails with this error if the stream is closed early.
        self._error: TandemError = WorkerLost("the worker closed the stream early")
        self._ended = False

    def push(self, update: pb.SequenceUpdate) -> None:
        if len(self._updates) >= _UPDATES_MAX:
            self._closed = True
        else:
            self._updates.append(update)
        self._changed.set()

    def note_submit(self, num_commands: int) -> None:
        """Records a submitted sequence. Command number `num_commands` adds it to the engine."""
        self._submits.append(num_commands)

    def push_load(self, load: pb.WorkerLoad, num_commands: int) -> None:
        """Queues this worker's load, measured after the engine applied `num_commands` commands."""
        while self._submits and self._submits[0] <= num_commands:
            self._submits.popleft()
            self._num_submits += 1
        self._load = load
        self._changed.set()

    def on_consumer_done(self, task: asyncio.Task[None]) -> None:
        """Ends the stream if the task that reads the router's commands failed.

        Otherwise the router would wait for a stream that no longer works.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # The router caused this error, so the error becomes the status of the stream.
        if isinstance(error, TandemError):
            self._error = error
        else:
            log.error(
                "reading a router's commands failed, so the stream to that router ends",
                exc_info=error,
            )
        self._closed = True
        self._changed.set()

    def set_draining(self, draining: bool) -> None:
        """Sets the `draining` field of all later messages, and sends a message at once."""
        self._draining = draining
        self._changed.set()

    def end(self) -> None:
        """Ends the stream once the collected updates were sent, because the worker stops."""
        self._ended = True
        self._changed.set()

    async def next_message(self) -> pb.DecodeUpdate | None:
        """Waits for an update, and returns all updates since the last message.

        Returns None when the stream has ended. Raises the stream's error if it was closed early.
        """
        await self._changed.wait()
        if self._closed:
            raise self._error
        if self._ended and not self._updates:
            return None
        if not self._ended:
            self._changed.clear()
        message = pb.DecodeUpdate(
            sequences=self._updates,
            load=self._load,
            num_submits=self._num_submits,
            draining=self._draining,
        )
        self._updates = []
        self._load = None
        return message
