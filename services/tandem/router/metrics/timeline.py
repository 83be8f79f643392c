"""Splits a request's time into stages, for clients, metrics and its trace alike.

    tokenize --> route --> queue --> prefill --> wire --> first token --> transfer_exposed --> ...
    |------------------------- ttft: the sum of these ------|             ... --> first_decode

A stream that moves to another worker in its midst has `move`, too: until that one's first token,
while the one it left still made some or not.

Router and workers each measure their own part: `queue` is waiting for a turn or a worker here, in
the decode worker's queue and in the prefill worker's; `transfer_exposed` and `first_decode` lie
between the first token and the second, because the first leaves before its blocks are here. `wire`
is what a submission took beyond the worker's own part: the network and the event loops of both.
`retry` is a submission that brought no token, because its worker was lost or refused. Until the
first token no moment is left out: time between two stages belongs to the later one.
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
    """The stages of one request; a stage that it came through twice is summed."""

    def __init__(self, span: RequestSpan = NO_SPAN) -> None:
        self.span = span
        self.began_s = time.monotonic()
        self.ttft_s: float | None = None
        self.last_token_s = self.began_s
        self.num_tokens = 0  # that came by `note_tokens`
        self.stages_s: dict[Stage, float] = {}
        self._told_until_s = self.began_s  # each moment before is in a stage, until the first token
        self._is_submitted = False  # a worker has it, and has brought no token

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        began_s = time.monotonic()
        if self.ttft_s is None:
            self._tell_until(began_s, "retry" if self._is_submitted else name)
            self._is_submitted = False
        try:
            yield
        finally:
            ended_s = time.monotonic()
            if self.ttft_s is None:
                self._tell_until(ended_s, name)
            else:
                self._add("move", ended_s - began_s)
            self.span.stage(name, began_s, ended_s)

    def submit(self) -> None:
        """Notes that a worker has the request from now on."""
        self._is_submitted = True

    @asynccontextmanager
    async def queueing(self, turn: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        """Enters `turn`, and counts the time until then as queueing."""
        async with AsyncExitStack() as inside:
            with self.stage("queue"):
                await inside.enter_async_context(turn)
            yield

    def note_tokens(self, now: float, num_tokens: int = 1) -> None:
        """Notes that the client gets tokens now: the first ones, or more."""
        self.last_token_s = now
        self.num_tokens += num_tokens
        if self.ttft_s is None:
            self._tell_until(now, "wire")
            self.ttft_s = now - self.began_s

    @property
    def wire_s(self) -> float:
        """Seconds since the last stage that is known, when a worker's first token has just come."""
        return time.monotonic() - self._told_until_s

    def take(self, timings: pb.SequenceTimings, num_tokens: int) -> None:
        """Takes in a decode worker's times, told with the first token that it made and the second.

        `num_tokens`: the request's, these and those that other workers made counted in.
        """
        if num_tokens == 1:
            queue_s = timings.queue_ms / 1000
            prefill_s = timings.prefill_ms / 1000
            self._add("queue", queue_s)
            self._add("prefill", prefill_s)
            self._told_until_s += queue_s + prefill_s
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

    def _tell_until(self, now: float, name: Stage) -> None:
        """Adds all time that is in no stage yet."""
        if now > self._told_until_s:
            self._add(name, now - self._told_until_s)
            self._told_until_s = now

    def _add(self, name: Stage, seconds: float) -> None:
        self.stages_s[name] = self.stages_s.get(name, 0.0) + seconds
