"""One router's multiplexed `Decode` stream: updates gather until the stream can take a message.

What a step brings for all of a router's requests travels as one message; a router that reads
slowly gets fewer, larger ones, and one that stops reading is cut off at a bound.
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
        self._submits: deque[int] = deque()  # the engine's commands that no load shows yet
        self._num_submits = 0  # that the load shows
        self._changed = asyncio.Event()
        self._draining = draining
        self._closed = False
        self._error: TandemError = WorkerLost("the stream was cut off")  # why it is closed
        self._ended = False

    def push(self, update: pb.SequenceUpdate) -> None:
        if len(self._updates) >= _UPDATES_MAX:
            self._closed = True
        else:
            self._updates.append(update)
        self._changed.set()

    def note_submit(self, num_commands: int) -> None:
        """Notes a submit, which the engine has once it applied `num_commands` commands."""
        self._submits.append(num_commands)

    def push_load(self, load: pb.WorkerLoad, num_commands: int) -> None:
        """The load after the engine applied so many commands."""
        while self._submits and self._submits[0] <= num_commands:
            self._submits.popleft()
            self._num_submits += 1
        self._load = load
        self._changed.set()

    def on_consumer_done(self, task: asyncio.Task[None]) -> None:
        """A consumer that broke ends the stream: its router must not wait on a deaf one."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, TandemError):  # the router's fault, which its status says
            self._error = error
        else:
            log.error("reading a router's commands broke", exc_info=error)
        self._closed = True
        self._changed.set()

    def tell_draining(self, draining: bool) -> None:
        """Every message says from now on whether the worker leaves; one goes out at once."""
        self._draining = draining
        self._changed.set()

    def end(self) -> None:
        """Ends the stream after what gathered so far, because the worker leaves."""
        self._ended = True
        self._changed.set()

    async def next_message(self) -> pb.DecodeUpdate | None:
        """All that gathered since the last message; waits until there is something. None: ended."""
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
