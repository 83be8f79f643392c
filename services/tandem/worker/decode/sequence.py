"""One request on its decode worker: its states, how far it is, and where its time went.

    QUEUED    --the engine reserved blocks for its prompt-----------> RESERVED
              --its first token comes: the engine computes it-------> RUNNING
    RESERVED  --a peer is asked for its KV--------------------------> PULLING
              --nobody is worth asking: `StartLocalPrefill`---------> RUNNING
              --a holder of its first blocks is: `Restart`----------> QUEUED
    PULLING   --all came: `Commit`, or `ContinuePrefill`------------> RUNNING
              --the lease failed before anything came---------------> RESERVED
              --it failed later: `Restart`, without what was pulled-> QUEUED
    any       --finished, failed, cancelled-------------------------> ENDED

`DecodeSequences` begins and ends a sequence, `DecodeService` moves it by what the engine reports,
and `PromptPrefill` from RESERVED on until it is RUNNING or QUEUED again. The engine holds its
blocks from RESERVED on, and frees them by itself at its finish, else at `Remove`; a lease ends when
the task that runs it leaves it, which ENDED cancels.

Its time, for the router, metrics and its trace:

    submitted --queue--> admitted --prefill--> first token --transfer exposed--> released
                                                    `--first decode--> second token --decode--> end

A prompt that a prefill worker computes waits in its queue, too: that time counts as queue.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.states import transition
from tandem.engine.types import Reserved, SequenceSpec
from tandem.net.observability.traces import NO_SPAN, Attributes, RequestSpan
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.worker.decode.router_stream import RouterStream
from tandem.worker.kv_pulls.lease import PullStats
from tandem.worker.prefill.prefix_choice import PrefixPlan


class SequenceState(Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    PULLING = "pulling"
    RUNNING = "running"
    ENDED = "ended"


_S = SequenceState
TRANSITIONS: Mapping[SequenceState, Collection[SequenceState]] = {
    _S.QUEUED: (_S.RESERVED, _S.RUNNING, _S.ENDED),
    _S.RESERVED: (_S.QUEUED, _S.PULLING, _S.RUNNING, _S.ENDED),
    _S.PULLING: (_S.QUEUED, _S.RESERVED, _S.RUNNING, _S.ENDED),
    _S.RUNNING: (_S.ENDED,),
    _S.ENDED: (),
}


@dataclass(frozen=True, slots=True)
class Submission:
    """A router's request for a sequence."""

    request_id: str
    attempt: int
    candidates: list[pb.PrefillCandidate] = field(default_factory=list)
    holders: list[pb.PrefixHolder] = field(default_factory=list)  # of the prompt's first blocks
    losses_max: int = 0  # prefill workers that may be lost under it; 0: as many as there are
    may_return: bool = False  # to the router, while nothing of it is begun


@dataclass(slots=True)
class DecodeSequence:
    """A sequence of a decode worker. `to` alone changes its state. Times are `time.monotonic()`
    seconds; 0: not yet."""

    submission: Submission
    spec: SequenceSpec
    stream: RouterStream
    span: RequestSpan = NO_SPAN
    state: SequenceState = SequenceState.QUEUED
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    shared_wait_s: float = 0.0  # before it was admitted, for blocks that others computed or pulled
    first_token_at: float = 0.0
    second_token_at: float = 0.0
    pulled: PullStats | None = None  # by the lease that brought its prompt
    num_sent: int = 0
    cached: CachedTokens = NONE_CACHED  # of the prompt
    timings: pb.SequenceTimings = field(
        default_factory=lambda: pb.SequenceTimings(transport="local")
    )
    reserved: asyncio.Future[Reserved] | None = None  # QUEUED again: its prefill awaits it
    prefilling: asyncio.Task[None] | None = None
    may_ask: bool = True  # False: what it lacks is computed here
    asks: asyncio.Timeout | None = None  # while a prefill worker computes its prompt: its end
    prefix: PrefixPlan | None = None  # LOCAL: whom to pull its first blocks from
    num_lost: int = 0  # prefill workers

    def to(self, state: SequenceState) -> None:
        self.state = transition(self.state, state, TRANSITIONS)

    @property
    def is_over(self) -> bool:
        return self.state is SequenceState.ENDED

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    def note_cached(self, reserved: Reserved) -> None:
        """Takes what is cached here. Blocks that came to the pool after the first admission count
        as the pool's."""
        num_tokens = min(reserved.num_cached_tokens, self.spec.num_prompt_tokens)
        self.cached = reserved.cached.first(num_tokens).then(CachedTokens(device=num_tokens))

    def note_first_token(self, now: float) -> None:
        self.first_token_at = now
        queue_s = max(0.0, (self.admitted_at or self.submitted_at) - self.submitted_at)
        if self.pulled is not None:
            queue_s += self.pulled.queue_s
            self.shared_wait_s += self.pulled.shared_wait_s
        self.timings.queue_ms = queue_s * 1000
        self.timings.shared_wait_ms = self.shared_wait_s * 1000
        self.timings.prefill_ms = max(0.0, now - self.submitted_at - queue_s) * 1000

    def note_second_token(self, now: float) -> None:
        self.second_token_at = now
        self.timings.second_token_ms = (now - self.first_token_at) * 1000

    def end_span(self, now: float, outcome: str) -> None:
        """Tells the trace its stages, as far as it came. `outcome`: as the router gets it, or
        `cancelled`, which is no error: it may go on at another worker."""
        if self.span is NO_SPAN:
            return
        self.span.stage("queue", self.submitted_at, self.admitted_at)
        self.span.stage("prefill", self.admitted_at, self.first_token_at)
        decode_from = self.first_token_at
        if (pulled := self.pulled) is not None and pulled.released_at:
            decode_from = max(decode_from, pulled.released_at)
            self.span.stage(
                "transfer",
                pulled.began_at,
                pulled.released_at,
                {
                    "tandem.transport": self.timings.transport,
                    "tandem.prefill_worker": self.timings.prefill_worker_id,
                    "tandem.bytes_pulled": pulled.num_bytes,
                    "tandem.exposed_ms": pulled.exposed_s * 1000,
                },
            )
        self.span.stage("first_decode", decode_from, self.second_token_at)
        self.span.stage("decode", self.second_token_at, now)
        error = "" if outcome in ("stop", "length", "cancelled") else outcome
        attributes: Attributes = {"tandem.outcome": outcome, "tandem.tokens_sent": self.num_sent}
        self.span.end(attributes, error=error)
