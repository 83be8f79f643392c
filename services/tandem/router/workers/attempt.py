"""Represents one submission of a request to a decode worker: its tokens, its end or its failure.

Each attempt buffers its own updates, so a client that reads slowly delays no other client. The
buffer needs no back pressure, because a request has at most `max_tokens` tokens of 4 bytes each. A
worker that sends more tokens violates the protocol, and the attempt fails.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tandem.errors import InternalError, TandemError, from_code
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb


class Attempt:
    """A submission and its result. The caller calls `close` when it reads no more updates."""

    def __init__(
        self, worker_id: str, number: int, tokens_left: int, on_close: Callable[[Attempt], None]
    ) -> None:
        """`tokens_left` is the largest number of tokens that the worker may still send.

        `number` is the attempt's number among the submissions of the request. The worker's updates
        for this attempt contain the number.
        """
        self.worker_id = worker_id
        self.failure: TandemError | None = None
        self.is_finished = False  # True: the worker has sent the finish reason "stop" or "length"
        self.is_draining = False  # True: the worker drains; the running sequences continue there
        # Number of prefill workers lost during this attempt, as last reported by the decode worker.
        self.num_lost = 0
        self._number = number
        self._tokens_left = tokens_left
        self._on_close = on_close
        self._updates: deque[pb.SequenceUpdate] = deque()
        self._has_answer = False
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.is_finished or self.failure is not None

    async def updates(self) -> list[pb.SequenceUpdate]:
        """Waits for updates and returns all updates since the last call.

        Returns an empty list if the worker began to drain. Raises the failure of the attempt once
        all updates have been read.
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
        """Waits until this attempt has a token or is over, or until `other` is over.

        The updates stay in the buffer, so the next call of `updates` returns them.
        """
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
        """Cancels the sequence on the worker unless the attempt is over. Never waits."""
        self._on_close(self)

    # The stream that receives the worker's updates (`client.py`) calls the next three methods.

    def take(self, update: pb.SequenceUpdate) -> None:
        if update.attempt != self._number or self.is_over:
            return
        self._tokens_left -= len(update.token_ids)
        if self._tokens_left < 0:
            self.fail(InternalError(f"worker {self.worker_id} sent more tokens than requested"))
            return
        self._updates.append(update)
        self._has_answer |= bool(update.token_ids)
        if update.finish_reason == "error":
            error = update.error
            after_s = error.retry_after_s or None
            self.failure = from_code(error.code, error.message, retry_after_s=after_s)
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
