"""One router's multiplexed `Decode` stream.

Updates are collected until the stream can take a message, so one message has the results of a step
for all of the router's requests. A router that reads slowly gets fewer, larger messages. A router
that stops reading is disconnected at a bound.
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
    """The outgoing side of a router's stream. `sequence_ids` end when the stream closes."""

    def __init__(self, *, draining: bool = False) -> None:
        self.sequence_ids: set[str] = set()
        self.transit = Transit()
        self._updates: list[pb.SequenceUpdate] = []
        self._load: pb.WorkerLoad | None = None
        self._submits: deque[int] = deque()  # command numbers of submits that no load includes yet
        self._num_submits = 0  # submits that the load includes
        self._changed = asyncio.Event()
        self._draining = draining
        self._closed = False
        self._error: TandemError = WorkerLost("the stream was cut off")  # reason for the closing
        self._ended = False

    def push(self, update: pb.SequenceUpdate) -> None:
        if len(self._updates) >= _UPDATES_MAX:
            self._closed = True
        else:
            self._updates.append(update)
        self._changed.set()

    def note_submit(self, num_commands: int) -> None:
        """Records a submit, which the engine has once it has applied `num_commands` commands."""
        self._submits.append(num_commands)

    def push_load(self, load: pb.WorkerLoad, num_commands: int) -> None:
        """Queues the load after the engine has applied `num_commands` commands."""
        while self._submits and self._submits[0] <= num_commands:
            self._submits.popleft()
            self._num_submits += 1
        self._load = load
        self._changed.set()

    def on_consumer_done(self, task: asyncio.Task[None]) -> None:
        """Ends the stream if its reader failed, so that the router does not wait for a dead
        stream.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, TandemError):  # an error of the router; it is the status of the stream
            self._error = error
        else:
            log.error("reading a router's commands broke", exc_info=error)
        self._closed = True
        self._changed.set()

    def set_draining(self, draining: bool) -> None:
        """Sends a message, and sets the `draining` field of it and of all later ones."""
        self._draining = draining
        self._changed.set()

    def end(self) -> None:
        """Ends the stream after the collected updates, because the worker stops."""
        self._ended = True
        self._changed.set()

    async def next_message(self) -> pb.DecodeUpdate | None:
        """Returns all updates since the last message, or None at the end. Waits for the first
        one.
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
