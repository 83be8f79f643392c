"""Divides a request's time into stages, for clients, metrics and its trace.

    Until the first token; the sum of these stages is the TTFT:
    tokenize           tokenization in the router
    route              placement in the router
    queue              wait for a turn or a worker in the router, and in the queues of the workers
    prefill            computation of the prompt
    wire               network and event loops between the router and the worker
    retry              a submission without a token, because the worker was lost or refused it

    Between the first and the second token (the first token is sent before KV blocks are pulled):
    transfer_exposed   wait of the decode worker for the pull of the KV blocks
    first_decode       the remaining time until the second token

    After a migration of a stream:
    move               time until the new worker's first token
The workers measure prefill, transfer_exposed and first_decode. The stages queue and move are sums
of times that the router and the workers measure. The router measures the other stages. Until the
first token, any time between two stages is added to the later stage.
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
    """The stages of one request. If a stage occurs more than once, its times are added."""

    def __init__(self, span: RequestSpan = NO_SPAN) -> None:
        self.span = span
        self.began_s = time.monotonic()
        self.ttft_s: float | None = None
        self.last_token_s = self.began_s
        self.num_tokens = 0  # number of tokens sent to the client
        self.stages_s: dict[Stage, float] = {}
        # All time from `began_s` to this moment has been added to stages. Until the first token,
        # the next stage begins here.
        self._covered_until_s = self.began_s
        self._is_submitted = False  # True: a worker has the request and has sent no token yet

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
        """Records that the request was sent to a worker."""
        self._is_submitted = True

    @asynccontextmanager
    async def queueing(self, turn: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        """Enters the context `turn`. The time until `turn` is entered is added to stage `queue`."""
        async with AsyncExitStack() as inside:
            with self.stage("queue"):
                await inside.enter_async_context(turn)
            yield

    def note_tokens(self, now: float, num_tokens: int = 1) -> None:
        """Records that tokens are sent to the client at `now`."""
        self.last_token_s = now
        self.num_tokens += num_tokens
        if self.ttft_s is None:
            self._cover_until(now, "wire")
            self.ttft_s = now - self.began_s

    @property
    def wire_s(self) -> float:
        """Seconds since the end of the last stage.

        When the first token arrives, these seconds are the stage `wire`.
        """
        return time.monotonic() - self._covered_until_s

    def take(self, timings: pb.SequenceTimings, num_before: int) -> None:
        """Adds a decode worker's timings, which arrive with the worker's first and second token.
        A worker that speculates may send further tokens together with the second one.

        `num_before` is the number of tokens that all workers have generated for the request before
        those that arrive with the timings.
        """
        if num_before == 0:
            queue_s = timings.queue_ms / 1000
            prefill_s = timings.prefill_ms / 1000
            self._add("queue", queue_s)
            self._add("prefill", prefill_s)
            self._covered_until_s += queue_s + prefill_s
        elif not timings.second_token_ms:
            self._add("move", (timings.queue_ms + timings.prefill_ms) / 1000)
        elif num_before == 1:
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
        """Adds the time from the end of the last stage until `now` to the stage `name`."""
        if now > self._covered_until_s:
            self._add(name, now - self._covered_until_s)
            self._covered_until_s = now

    def _add(self, name: Stage, seconds: float) -> None:
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds
