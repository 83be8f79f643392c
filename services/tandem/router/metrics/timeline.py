"""Divides a request's time into stages, for clients, metrics and its trace.

    tokenize --> route --> queue --> prefill --> wire --> first token --> transfer_exposed --> ...
    |------------------------- ttft: the sum of these ------|             ... --> first_decode
A stream that migrates after its first token also has `move`: the time until the new worker's first
token, whether or not the old worker still generated some.
Router and workers each measure their own part. `queue` is the wait for a turn or a worker in the
router, and in the queues of the decode and the prefill worker. `transfer_exposed` and
`first_decode` are between the first and the second token, because the first is sent before the
blocks are pulled. `wire` is the part of a submission outside the worker: the network and both event
loops. `retry` is a submission without a token, because its worker was lost or refused it. Until the
first token, the stages cover all time: time between two stages belongs to the later one.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Literal, get_args

from tandem.net.observability.traces import NO_SPAN, RequestSpan
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb

TtftStage = Literal["tokenize", "route", "queue", "prefill", "retry", "wire"]
Stage = TtftStage | Literal["transfer_exposed", "first_decode", "move"]
TTFT_STAGES: tuple[TtftStage, ...] = get_args(TtftStage)
STAGES: tuple[Stage, ...] = (*TTFT_STAGES, "transfer_exposed", "first_decode", "move")


class Timeline:
    """The stages of one request. Repeated stages are added."""

    def __init__(self, span: RequestSpan = NO_SPAN) -> None:
        self.span = span
        self.began_s = time.monotonic()
        self.ttft_s: float | None = None
        self.last_token_s = self.began_s
        self.num_tokens = 0  # counted by `note_tokens`
        self.stages_s: dict[Stage, float] = {}
        # until the first token, all time before this is in a stage
        self._covered_until_s = self.began_s
        self._is_submitted = False  # a worker has it and has sent no token

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        began_s = time.monotonic()
        if self.ttft_s is None:
            self._cover_until(began_s, "retry" if self._is_submitted else name)
            self._is_submitted = False
        try:
            yield
        finally:
            ended_s = time.monotonic()
            if self.ttft_s is None:
                self._cover_until(ended_s, name)
            else:
                self._add("move", ended_s - began_s)
            self.span.stage(name, began_s, ended_s)

    def submit(self) -> None:
        """Records that a worker has the request now."""
        self._is_submitted = True

    @asynccontextmanager
    async def queueing(self, turn: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        """Enters `turn` and counts the time until then as queueing."""
        async with AsyncExitStack() as inside:
            with self.stage("queue"):
                await inside.enter_async_context(turn)
            yield

    def note_tokens(self, now: float, num_tokens: int = 1) -> None:
        """Records that tokens are sent to the client now."""
        self.last_token_s = now
        self.num_tokens += num_tokens
        if self.ttft_s is None:
            self._cover_until(now, "wire")
            self.ttft_s = now - self.began_s

    @property
    def wire_s(self) -> float:
        """Seconds since the last known stage, when a worker's first token has just arrived."""
        return time.monotonic() - self._covered_until_s

    def take(self, timings: pb.SequenceTimings, num_tokens: int) -> None:
        """Adds a decode worker's timings, which arrive with its first and second token.

        `num_tokens` is the request's number of tokens so far, over all workers.
        """
        if num_tokens == 1:
            queue_s = timings.queue_ms / 1000
            prefill_s = timings.prefill_ms / 1000
            self._add("queue", queue_s)
            self._add("prefill", prefill_s)
            self._covered_until_s += queue_s + prefill_s
        elif not timings.second_token_ms:
            self._add("move", (timings.queue_ms + timings.prefill_ms) / 1000)
        elif num_tokens == 2:
            exposed_ms = timings.transfer_exposed_ms
            self._add("transfer_exposed", exposed_ms / 1000)
            self._add("first_decode", max(0.0, timings.second_token_ms - exposed_ms) / 1000)

    def server_timing(self) -> str:
        """Returns all known times as the value of a Server-Timing header (W3C), in milliseconds."""
        known = [(name, self.stages_s[name]) for name in STAGES if name in self.stages_s]
        if self.ttft_s is not None:
            known.append(("ttft", self.ttft_s))  # type: ignore[arg-type]
        known.append(("total", time.monotonic() - self.began_s))  # type: ignore[arg-type]
        return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in known)

    def _cover_until(self, now: float, name: Stage) -> None:
        """Adds the time that is in no stage yet to a stage."""
        if now > self._covered_until_s:
            self._add(name, now - self._covered_until_s)
            self._covered_until_s = now

    def _add(self, name: Stage, seconds: float) -> None:
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds
