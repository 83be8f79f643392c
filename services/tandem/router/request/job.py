"""Defines jobs. A job is one completion of a prepared request on its way through the router.

The states of a job and their next states:
    PLACING      the Dispatcher chooses the workers
                     a decode worker was chosen                 SUBMITTED
                     the tenant must wait for its turn          WAITING
                     no decode worker is usable                 PENDING
    WAITING      the job waits for its tenant's turn
                     the tenant has the turn                    PLACING
    PENDING      the job waits for a usable decode worker
                     a decode worker is usable                  PLACING
    SUBMITTED    a decode worker has the job
                     the completion ended with stop or length   ENDED
                     the worker refused the job or was lost     PLACING
                     the worker drains                          MIGRATING
    MIGRATING    a draining worker still runs the job, and another worker prepares to continue it
                     the new worker has generated a token       SUBMITTED
                     no other worker accepts the job            SUBMITTED
                     the draining worker finishes first         SUBMITTED
From PLACING, WAITING, PENDING and SUBMITTED, an error leads to FAILED. If the client disconnects,
these states change to CANCELLED.

Only the Dispatcher changes the state of a job, by `Job.to`. When a job leaves a worker, the
Dispatcher closes the job's `Attempt`, which cancels the job on that worker.

A job fails after it has lost a few workers (migration_budget.py). A job that a worker has accepted
once is not refused later if all workers are full or no worker is usable; the job waits.

A job knows token ids, not text. A job that moves to another worker continues with the prompt and
the output so far as its input. The tokens are the same as without the move, because the random
numbers of sampling depend only on the seed and the token's position.
"""

import asyncio
import math
import secrets
import time
from asyncio import Task
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.adapter import Adapter, digest_of
from tandem.common.block_hash import block_hash
from tandem.common.cached_tokens import CachedTokens
from tandem.common.kv_budget import KvBudget
from tandem.common.perf_model.predict import Prefill
from tandem.common.prompt_image import PromptImage, image_marks, with_flags
from tandem.common.retention import Retention
from tandem.common.sampling_params import SamplingParams
from tandem.common.states import transition
from tandem.errors import AdapterUnavailable, NeverFits, Overloaded
from tandem.net.rpc.convert import to_message, to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.admission.calibration import Promise
from tandem.router.admission.capacity import COMPLETION_TOKENS_LIKELY
from tandem.router.admission.turns import Claim
from tandem.router.metrics.timeline import Timeline
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import PrefixHolder, reuse
from tandem.router.placement.reasons import Reason, sentence_of
from tandem.router.request.migration_budget import LOSSES_MAX
from tandem.router.request.request import ClientRequest

if TYPE_CHECKING:
    from tandem.net.store.registry import KvCompatibility

# Fraction of the time left until the TTFT limit that a worker gets for the first token. Example: if
# 10 s are left, the worker refuses the job if the first token would take more than 9.8 s.
WORKER_SHARE = 0.98
# Shortest time in seconds that a worker gets for the first token. The value is not 0, because
# workers read 0 as no limit.
FIRST_TOKEN_MIN_S = 1e-3


RETURNS_MAX = 4  # how often workers may return one request from their queues to the router


class JobState(Enum):
    PLACING = "placing"
    WAITING = "waiting"
    PENDING = "pending"
    SUBMITTED = "submitted"
    MIGRATING = "migrating"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


_CUT = (JobState.FAILED, JobState.CANCELLED)
TRANSITIONS: Mapping[JobState, Collection[JobState]] = {
    JobState.PLACING: (JobState.WAITING, JobState.PENDING, JobState.SUBMITTED, *_CUT),
    JobState.WAITING: (JobState.PLACING, *_CUT),
    JobState.PENDING: (JobState.PLACING, *_CUT),
    JobState.SUBMITTED: (JobState.PLACING, JobState.MIGRATING, JobState.ENDED, *_CUT),
    JobState.MIGRATING: (JobState.SUBMITTED,),
    JobState.ENDED: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A client's request with its prompt as token ids."""

    client: ClientRequest
    sampling: SamplingParams  # the client's parameters with all defaults filled in, for engines
    token_ids: list[int]
    grammar: str = ""  # grammar that the completion must match; "": any text is allowed
    cache_salt: bytes = b""
    adapter: Adapter | None = None  # None: the base model
    block_size: int = 0  # the workers' block size; 0: unknown
    # Only used if the client requested a pin: the KV of this many leading prompt tokens is pinned.
    # 0: the KV of the whole prompt and the completion is pinned.
    pinned_tokens: int = 0
    images: tuple[PromptImage, ...] = ()  # the prompt's images, in the order of their tokens
    # Number of leading prompt tokens that all chats with the same system prompt and tools have; 0:
    # unknown.
    system_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """Largest number of completion tokens."""
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def embed(self) -> bool:
        return self.client.embed

    @property
    def is_batch(self) -> bool:
        return self.client.is_batch

    @property
    def kv_budget(self) -> KvBudget | None:
        return self.client.kv_budget

    @property
    def storable_tokens(self) -> int:
        """Number of prompt tokens in full KV blocks. Only full blocks can be cached.

        If only leading tokens of the prompt are pinned, only full blocks of pinned tokens count.
        """
        size = self.block_size
        num_tokens = self.pinned_tokens or len(self.token_ids)
        return num_tokens // size * size if size else 0

    @property
    def retention(self) -> Retention:
        """The retention of the request's KV, as workers receive it."""
        return msgspec.structs.replace(self.client.wishes, num_tokens=self.pinned_tokens)

    def chain_root(self, compatibility: "KvCompatibility") -> bytes:
        """Returns the parent hash of the prompt's first block."""
        return compatibility.chain_root(self.cache_salt, digest_of(self.adapter))


def prepare_request(
    client: ClientRequest,
    token_ids: list[int],
    *,
    max_tokens: int,
    vocab_size: int,
    eos_token_ids: Collection[int],
    bad_words: list[list[int]],
    grammar: str,
    **placed: Any,
) -> PreparedRequest:
    """Fills in all defaults of a client's request whose prompt is tokenized.

    `max_tokens` is the largest number of completion tokens. `placed` has further fields of the
    PreparedRequest, such as `cache_salt` and `block_size`.
    """
    sampling = client.sampling
    seed, logprobs = sampling.seed, sampling.logprobs
    if logprobs is None and client.num_sequences > sampling.n:
        logprobs = 0
    if client.use_beam_search:
        sampling = SamplingParams(temperature=0.0)
        logprobs = 2 * client.sampling.n
    stop_token_ids = set(client.sampling.stop_token_ids or ())
    # A completion with a grammar must be able to end where the grammar ends, also with
    # `ignore_eos`.
    if grammar or not client.sampling.ignore_eos:
        stop_token_ids.update(eos_token_ids)
    return PreparedRequest(
        client,
        sampling.resolved(
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            # A worker generates at least one token. If max_tokens is 0, the router leaves this
            # token out of the answer.
            max_tokens=max(1, max_tokens),
            stop_token_ids=sorted(stop_token_ids),
            bad_words_token_ids=[run for run in bad_words if max(run) < vocab_size],
            logprobs=logprobs,
            prompt_logprobs=client.sampling.prompt_logprobs,
        ),
        token_ids,
        grammar=grammar,
        **placed,
    )


@dataclass(slots=True)
class Progress:
    """A job's tokens and timings so far, over all workers that have run the job."""

    # Hashes of the prompt's full blocks. `Job.hashes` appends the hashes of the output's blocks.
    block_hashes: list[bytes]
    timeline: Timeline
    output_token_ids: list[int] = field(default_factory=list)
    # If requested: log probabilities of the prompt's tokens after the first.
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    # If requested: the hidden state of the prompt's last token.
    embedding: list[float] = field(default_factory=list)
    # number of prompt tokens whose KV was cached when the first token was generated
    cached_tokens: int = 0
    # How many of cached_tokens came from each tier. None: the worker that generated the first token
    # has no tiers besides the KV pool.
    cached_by_tier: CachedTokens | None = None
    timings: pb.SequenceTimings = field(default_factory=pb.SequenceTimings)
    # The decode worker that sent the first token, the number of its submission (None: no token yet)
    # and its timings. A later worker's timings are about the tokens after a migration.
    first_worker_id: str = ""
    first_attempt: int | None = None
    first_timings: pb.SequenceTimings = field(default_factory=pb.SequenceTimings)
    # Numbers of the submissions to workers that have generated output tokens.
    attempts: set[int] = field(default_factory=set)
    num_migrations: int = 0
    num_lost: int = 0  # number of prefill and decode workers that were lost while they ran the job

    def take_source(self, update: pb.SequenceUpdate) -> None:
        """Records which submission generated the tokens of an update.

        From the job's first update, it also records how many prompt tokens were cached.
        """
        # The jobs of later beam steps begin with output tokens. Their cached tokens do not count.
        if not (self.attempts or self.output_token_ids):
            self._take_cached(update)
        self.attempts.add(update.attempt)

    def take_timings(self, update: pb.SequenceUpdate, worker_id: str) -> None:
        """Records the timings of an update by the decode worker `worker_id`, if it is the worker
        that sent the first token."""
        if update.token_ids and self.first_attempt is None:
            self.first_worker_id = worker_id
            self.first_attempt = update.attempt
        if update.HasField("timings") and update.attempt == self.first_attempt:
            self.first_timings = update.timings

    def _take_cached(self, update: pb.SequenceUpdate) -> None:
        self.cached_tokens = update.cached_tokens
        if update.HasField("cached_by_tier"):
            self.cached_by_tier = to_struct(CachedTokens, update.cached_by_tier)


@dataclass(frozen=True, slots=True)
class Routed:
    """The placement of one submission, and why its workers were chosen."""

    placement: Placement
    # id of a worker or tier -> number of the prompt's leading blocks found there before placement
    matches: dict[str, int]
    kind: Reason

    @property
    def reason(self) -> str:
        """Why these workers were chosen, in one line."""
        return f"{self.kind}: {self.placement.summary}"

    @property
    def sentence(self) -> str:
        """Why these workers were chosen, in words for operators."""
        return sentence_of(self.kind, self.placement)


@dataclass(slots=True)
class Routing:
    """The routing of a job: its current workers, and the workers that have refused it.

    Times are in seconds on the monotonic clock.
    """

    routed: Routed | None = None
    # The look-up in the prefix tree for the first placement. None: it was not started in advance.
    lookup: Task[dict[str, int]] | None = None
    num_submissions: int = 0
    # (id of a prefill worker, work of the job's prompt, time of the submission) while the router
    # counts the prompt as load of this worker. None: the prompt is not counted.
    requested_prefill: tuple[str, Prefill, float] | None = None
    is_admitted: bool = False
    is_urgent: bool = False  # True: admitted even if the first token will be too late
    has_turn: bool = False  # True: the job need not wait for its turn
    is_in_turn: bool = False  # True: the job was admitted, and then had to wait for its turn
    # What the request counts for its tenant. None: requests did not take turns when it arrived.
    claim: Claim | None = None
    is_charged: bool = False  # True: the request had its turn, so `claim` was counted
    tokens_missing: int = 0  # number of prompt tokens that no worker had when `claim` was made
    # The predicted TTFT, from which the calibration learns when the first token arrives. None: the
    # first token has arrived, or there is no prediction.
    promise: Promise | None = None
    # Latest useful time of the first token. Workers may refuse a job that would miss this time.
    first_token_by: float = math.inf
    # When an admitted job began to wait for a worker. None: a worker has the job, or the job is not
    # admitted yet. An admitted job waits where a new one would be refused.
    unassigned_since: float | None = None
    leaves: str = ""  # id of the worker from which the job migrates now; "": no migration runs
    # After a failed migration: the earliest time of the next attempt to migrate.
    stays_until: float = -math.inf
    refused: set[str] = field(default_factory=set)  # epochs of the workers that refused the job
    # Shortest delay before a retry that a worker with a full queue has sent.
    retry_after_s: float | None = None
    num_returns: int = 0  # how often workers have returned the job from their queues to the router
    # Epoch of the worker that has just returned the job. The next placement clears this field.
    returned_by: str = ""
    # The last refusal by a worker that could not generate the first token in time.
    overloaded: Overloaded | None = None
    # The last refusal by a worker that can never run the job.
    cannot_take: NeverFits | AdapterUnavailable | None = None

    def clear_refusals(self) -> None:
        """Allows the workers that refused the job to be chosen again."""
        self.refused.clear()
        self.retry_after_s = self.overloaded = None


def _do_nothing() -> None:
    pass


@dataclass(slots=True)
class Job:
    """One completion on its way through the router. Only `to` changes `state`.

    A request has one or several jobs (choices/). A job with a `parent` begins once the parent's
    worker has all KV of the prompt, or the parent has ended. If possible, the job is placed on the
    parent's worker and uses the KV there.
    """

    request: PreparedRequest
    progress: Progress
    routing: Routing = field(default_factory=Routing)
    state: JobState = JobState.PLACING
    index: int = 0  # index among the jobs of the request
    parent: "Job | None" = None
    # This event is set when the jobs whose `parent` is this job may begin.
    may_fork: asyncio.Event = field(default_factory=asyncio.Event)
    # Called each time that a worker has admitted the job or sent a token.
    on_admitted: Callable[[], None] = _do_nothing

    def __post_init__(self) -> None:
        # The endpoint picker has admitted a request with a hint, and the gate of batches a line. So
        # lines do not count in the demand, and the pools do not grow for them.
        if self.request.client.hint is not None or self.request.client.is_batch:
            self.routing.is_admitted = self.routing.has_turn = True

    def to(self, state: JobState) -> None:
        self.state = transition(self.state, state, TRANSITIONS)

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def request_id(self) -> str:
        request_id = self.request.client.request_id
        return f"{request_id}.{self.index}" if self.index else request_id

    @property
    def worker(self) -> WorkerSnapshot | None:
        """The decode worker of the last submission; None before the first one."""
        return self.routing.routed.placement.decode if self.routing.routed else None

    @property
    def is_budget_restarted(self) -> bool:
        """True if a second worker had to choose again which blocks to keep within the KV budget.

        Some KV budgets keep the blocks that have received the most attention so far. A worker that
        continues the job does not know this attention and must measure it again.
        """
        budget = self.request.client.kv_budget
        keeps_hitters = budget is not None and budget.keeps_hitters
        return keeps_hitters and len(self.progress.attempts) > 1

    @property
    def required_workers(self) -> tuple[str, str]:
        """Ids of the (decode worker, prefill worker) to use if they are usable; "": any worker.

        A job with a parent prefers the parent's decode worker. Another job prefers the workers of
        the endpoint picker's hint, but only for the first submission.
        """
        if self.parent is not None:
            worker = self.parent.worker
            return (worker.worker_id if worker else ""), ""
        hint = self.request.client.hint
        if hint is None or self.routing.num_submissions:
            return "", ""
        return hint.decode, hint.prefill

    @property
    def deadline(self) -> float:
        """The monotonic time after which the client has no use for the first token. Infinite if the
        client named none, if there is a token, and for a job with a parent."""
        deadline_s = self.request.client.deadline_s
        if deadline_s is None or self.parent is not None or self.progress.output_token_ids:
            return math.inf
        return self.progress.timeline.began_s + deadline_s

    @property
    def num_tokens(self) -> int:
        """Number of input tokens: the prompt and the output so far."""
        return len(self.request.token_ids) + len(self.progress.output_token_ids)

    def hashes(self, compatibility: "KvCompatibility | None") -> list[bytes]:
        """Returns the hashes of all full blocks of the input: the prompt and the output so far.

        If `compatibility` is None, blocks of the output are left out. A job with a KV budget has no
        hashes, because KV under a budget is not shared.
        """
        block_hashes = self.progress.block_hashes
        if self.request.client.kv_budget is not None:
            return block_hashes
        if compatibility is None or not self.progress.output_token_ids:
            return block_hashes
        size = compatibility.block_size
        parent = block_hashes[-1] if block_hashes else None
        marks = image_marks(self.request.images, size)
        for start in range(len(block_hashes) * size, self.num_tokens - size + 1, size):
            parent = parent or self.request.chain_root(compatibility)
            mark = marks.get(start // size, b"")
            parent = block_hash(parent, self._tokens(start, start + size), mark)
            block_hashes.append(parent)
        return block_hashes

    def _tokens(self, start: int, end: int) -> list[int]:
        """Returns the tokens from `start` to `end` of the prompt followed by the output."""
        token_ids = self.request.token_ids
        output_token_ids = self.progress.output_token_ids
        prompt = len(token_ids)
        output = output_token_ids[max(0, start - prompt) : max(0, end - prompt)]
        return token_ids[start:end] + output


@dataclass(frozen=True, slots=True)
class JobStep:
    """New tokens of a job. Only the last step has a `finish_reason`, "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str = ""
    # Log probabilities, one entry for each token in token_ids; empty if not requested.
    logprobs: list[LogprobEntry] = field(default_factory=list)


def work_of(job: Job, block_size: int, completion_tokens: float = 0.0) -> Work:
    """Returns the properties of a job that determine its placement.

    `completion_tokens` is the mean number of output tokens of a request; 0 if unknown.
    """
    budget = job.request.client.kv_budget
    budget_tokens = None if budget is None else budget.tokens
    tokens_left = job.request.max_tokens - len(job.progress.output_token_ids)
    return Work(
        job.num_tokens,
        block_size,
        job.request.adapter,
        budget_tokens,
        min(tokens_left, completion_tokens or COMPLETION_TOKENS_LIKELY),
        job.request.client.wishes.returns,
    )


def submission(
    job: Job,
    work: Work,
    placement: Placement,
    matches: Mapping[str, int],
    leaves: WorkerSnapshot | None = None,
) -> pb.SubmitSequence:
    """Returns the message that submits a job to a decode worker.

    `leaves` is the worker from which the job migrates. The new worker can pull all KV blocks of the
    job from `leaves`. None: the job does not migrate.
    """
    request = job.request
    progress = job.progress
    trace = progress.timeline.span.headers
    holders = list(placement.prefix_holders)
    if leaves is not None:
        holders.insert(0, PrefixHolder(leaves, len(progress.block_hashes)))
    return pb.SubmitSequence(
        request_id=job.request_id,
        attempt=job.routing.num_submissions,
        input=model_input(request, progress.output_token_ids),
        prefill_candidates=[_candidate(work, w, matches) for w in placement.prefill_candidates],
        prefix_holders=[
            to_message(pb.PrefixHolder, each.worker, num_blocks=each.num_blocks, load_s=each.load_s)
            for each in holders
        ],
        trace=pb.TraceContext(**trace) if trace else None,
        losses_max=max(1, LOSSES_MAX - progress.num_lost),
        fork_of=_fork_of(job, placement),
        first_token_s=_first_token_s(job),
        may_return=_may_return(job),
        sent_at_s=time.monotonic(),
    )


def model_input(request: PreparedRequest, output_token_ids: Sequence[int] = ()) -> pb.SequenceInput:
    """Returns the request as engines receive it: the prompt, followed by the output so far."""
    # `to_message` reads the message's fields from `request` and from `request.sampling`.
    return to_message(
        pb.SequenceInput,
        request,
        token_ids=[*with_flags(request.token_ids, request.images), *output_token_ids],
    )


def _may_return(job: Job) -> bool:
    is_begun = bool(job.progress.output_token_ids) or job.routing.leaves
    return job.parent is None and not is_begun and job.routing.num_returns < RETURNS_MAX


def _first_token_s(job: Job) -> float:
    by = job.routing.first_token_by
    left_s = WORKER_SHARE * (by - time.monotonic())
    return 0.0 if by == math.inf else max(FIRST_TOKEN_MIN_S, left_s)


def _candidate(
    work: Work, worker: WorkerSnapshot, matches: Mapping[str, int]
) -> pb.PrefillCandidate:
    cached_blocks = matches.get(worker.worker_id, 0)
    reused = reuse(work, worker, matches)
    return to_message(
        pb.PrefillCandidate,
        worker,
        cached_blocks=cached_blocks,
        loaded_blocks=max(0, reused.num_tokens // work.block_size - cached_blocks),
        load_s=reused.load_s,
    )


def _fork_of(job: Job, placement: Placement) -> str:
    parent = job.parent
    if parent is None or (worker := parent.worker) is None:
        return ""
    return parent.request_id if worker.epoch == placement.decode.epoch else ""
