"""One submission of a request to a decode worker, and its answer: tokens, an end, a failure.

Its updates wait in a buffer of its own, so a client that reads slowly holds up nobody else; the
buffer needs no back pressure, because a request makes at most `max_tokens` tokens and each is 4
bytes. More than that breaks the protocol and fails it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tandem.errors import InternalError, TandemError, from_code
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb


class Attempt:
    """A submission and its answer; `close` it when nobody reads it any more."""

    def __init__(
        self, worker_id: str, number: int, tokens_max: int, on_close: Callable[[Attempt], None]
    ) -> None:
        """`tokens_max` more tokens may come; `number` is what the worker's updates name."""
        self.worker_id = worker_id
        self.failure: TandemError | None = None
        self.is_finished = False  # "stop" or "length" came, read or not
        self.is_draining = False  # the worker leaves, but goes on with what it has
        self.num_lost = 0  # prefill workers, as it was told last
        self._number = number
        self._tokens_left = tokens_max
        self._on_close = on_close
        self._updates: deque[pb.SequenceUpdate] = deque()
        self._has_answer = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.is_finished or self.failure is not None

    async def updates(self) -> list[pb.SequenceUpdate]:
        """Returns all updates since the last call; none when the worker has said that it leaves.

        Raises what it failed with, once all before that was read.
        """
        while not self._updates:
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()
            if self.is_draining:
                break
        ready = list(self._updates)
        self._updates.clear()
        return ready

    async def news_or_end_of(self, other: Attempt) -> None:
        """Returns when this one has a token or is over, or the other is over. Reads nothing."""
        waits = [
            asyncio.create_task(self._until(lambda: self._has_answer or self.is_over)),
            asyncio.create_task(other._until(lambda: other.is_over)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def close(self) -> None:
        """Cancels the sequence at the worker unless it ended there. Never waits."""
        self._on_close(self)

    # For the stream that it came by.

    def take(self, update: pb.SequenceUpdate) -> None:
        if update.attempt != self._number or self.is_over:
            return
        self._tokens_left -= len(update.token_ids)
        if self._tokens_left < 0:
            self.fail(InternalError(f"worker {self.worker_id} sent more tokens than were asked"))
            return
        self._updates.append(update)
        self._has_answer |= bool(update.token_ids)
        if update.finish_reason == "error":
            told = update.error
            after_s = told.retry_after_s or None
            self.failure = from_code(told.code, told.message, retry_after_s=after_s)
        else:
            self.is_finished = bool(update.finish_reason)
        self._changed.set()

    def note_draining(self, draining: bool) -> None:
        self.is_draining = draining
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        self.failure = self.failure or error
        self._changed.set()

    async def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._changed.clear()
            await self._changed.wait()
