"""One request on its decode worker: its states, its progress and its timings.

    QUEUED      waits for blocks
    RESERVED    has blocks for its prompt, which have no KV yet
    PULLING     has a lease with another worker, from which KV is pulled into the blocks
    RUNNING     is computed by the engine: local prefill or decode
    ENDED       finished, failed or was cancelled

    from        event                                                   to
    QUEUED      the engine reserved blocks for the prompt               RESERVED
                the engine prefilled the prompt itself                  RUNNING
    RESERVED    a lease with another worker starts                      PULLING
                local prefill is faster (`StartLocalPrefill`)           RUNNING
                a prefix is to be pulled first (`Restart`)              QUEUED
    PULLING     all blocks arrived (`Commit` or `ContinuePrefill`)      RUNNING
                the lease failed, and no block was announced            RESERVED
                the lease failed later (`Restart` drops the blocks)     QUEUED
    any         the sequence finished, failed or was cancelled          ENDED

Three classes change the state:

- `DecodeSequences` adds and ends a sequence.
- `DecodeService` applies the engine's reports.
- `PromptPrefill` changes the state from RESERVED until the sequence is RUNNING or QUEUED again.

The engine holds the blocks of a sequence from RESERVED on. The engine frees the blocks when the
sequence finishes, or at `Remove`. When a sequence ends, its prefill task is cancelled, which also
ends the lease.

The timings of a sequence appear in the router, the metrics and the trace:

    timing              from           to
    queue               submitted      admitted by the engine
    prefill             admitted       first token
    transfer exposed    first token    released: the producer has confirmed that the pull is valid
    first decode        first token    second token
    decode              second token   end

The time in a prefill worker's queue counts as queue, too.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.common.cached_tokens import NONE_CACHED, CachedTokens
from tandem.common.speculation import Speculated
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
    # workers that have cached the first blocks of the prompt
    holders: list[pb.PrefixHolder] = field(default_factory=list)
    losses_max: int = 0  # lost prefill workers after which the sequence fails; 0: no limit
    # True: the router may move the sequence to another worker until its prefill begins
    may_return: bool = False


@dataclass(slots=True)
class DecodeSequence:
    """A sequence of a decode worker. Only `to` changes its state.

    Times are `time.monotonic()` seconds; 0 means not reached yet.
    """

    submission: Submission
    spec: SequenceSpec
    stream: RouterStream
    span: RequestSpan = NO_SPAN
    state: SequenceState = SequenceState.QUEUED
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    is_admission_sent: bool = False  # True once the router knows that the request is not refused
    # part of the time before admission in which the sequence waited for blocks that other requests
    # computed or pulled, in seconds
    shared_wait_s: float = 0.0
    tokens_ahead: int = 0  # number of prompt tokens that this worker had to compute at its arrival
    first_token_at: float = 0.0
    second_token_at: float = 0.0
    pulled: PullStats | None = None  # statistics of the lease that delivered the prompt's KV
    num_sent: int = 0
    cached: CachedTokens = NONE_CACHED  # prompt tokens cached on this worker, by location
    timings: pb.SequenceTimings = field(
        default_factory=lambda: pb.SequenceTimings(transport="local")
    )
    # Set while the sequence is QUEUED again after a failed lease. The task `prefilling` awaits the
    # new reservation.
    reserved: asyncio.Future[Reserved] | None = None
    prefilling: asyncio.Task[None] | None = None
    may_prefill_remotely: bool = True  # False: this worker computes the missing tokens itself
    # Timeout around the open lease; None: no lease is open. It has no deadline until
    # `DecodeService.stop_remote_prefills` sets one to end the lease.
    remote_prefill: asyncio.Timeout | None = None
    # plan for pulling the prompt's first blocks from a holder before local prefill; None: no pull
    prefix: PrefixPlan | None = None
    num_lost: int = 0  # prefill workers lost while they prefilled this sequence

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
        """Records how many of the prompt's tokens are cached on this worker, and where.

        `reserved.cached` has the locations at the first admission of the sequence. If it is
        admitted again, tokens cached since then count as cached in the KV pool (`device`).
        """
        num_tokens = min(reserved.num_cached_tokens, self.spec.num_prompt_tokens)
        self.cached = reserved.cached.first(num_tokens).then(CachedTokens(device=num_tokens))

    def note_first_token(self, now: float) -> None:
        self.first_token_at = now
        queue_s = max(0.0, (self.admitted_at or self.submitted_at) - self.submitted_at)
        if self.pulled is not None:
            queue_s += self.pulled.queue_s
            self.shared_wait_s += self.pulled.shared_wait_s
            self.tokens_ahead = self.pulled.tokens_ahead
            self.timings.prefill_queue_ms = self.pulled.queue_s * 1000
        self.timings.queue_ms = queue_s * 1000
        self.timings.shared_wait_ms = self.shared_wait_s * 1000
        self.timings.tokens_ahead = self.tokens_ahead
        self.timings.prefill_ms = max(0.0, now - self.submitted_at - queue_s) * 1000

    def note_second_token(self, now: float) -> None:
        self.second_token_at = now
        self.timings.second_token_ms = (now - self.first_token_at) * 1000

    def note_speculated(self, speculated: Speculated) -> None:
        self.timings.tokens_proposed = speculated.proposed_tokens
        self.timings.tokens_accepted = speculated.accepted_tokens
        self.timings.speculation_saved_ms = speculated.saved_s * 1000

    def end_span(self, now: float, outcome: str) -> None:
        """Ends the trace span and adds the stages that were reached.

        `outcome` is a finish reason, an error code or "cancelled". A cancelled sequence is no
        error, because the request may continue on another worker.
        """
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
