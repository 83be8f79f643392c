"""A prepared request on its way through the router: its states, how far it is, where it goes.

    PLACING    --a decode worker is chosen------------------> SUBMITTED
               --tenants take turns-------------------------> WAITING
               --no decode worker is usable-----------------> PENDING
    WAITING    --its tenant's turn came---------------------> PLACING
    PENDING    --a worker came------------------------------> PLACING
    SUBMITTED  --stop or length-----------------------------> ENDED
               --refused there, or the worker was lost------> PLACING
               --the worker leaves--------------------------> MIGRATING
    MIGRATING  --another has a token, or nobody takes it----> SUBMITTED
    any other  --error--> FAILED, --closed by its caller----> CANCELLED

The Dispatcher alone changes the state of a job, by `Job.to`. A job holds nothing itself: the
Dispatcher closes the `Attempt` that a job leaves, which cancels it at that worker, and counts back
what a prefill worker was asked for (`Routing.asked`). A worker is lost to a job at most a few times
(migration_budget.py). A request that was taken once is not refused for want of capacity: it waits
where all are full or none is there.

Knows token ids, not text. What was made so far goes with the prompt wherever the request migrates,
and sampling is seeded by position: so it makes the same tokens there.
"""

import asyncio
import math
import secrets
import time
from asyncio import Task
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from tandem.common.adapter import Adapter, digest_of
from tandem.common.block_hash import block_hash
from tandem.common.cached_tokens import CachedTokens
from tandem.common.perf_model.predict import Prefill
from tandem.common.retention import Retention
from tandem.common.states import transition
from tandem.errors import AdapterUnavailable, NeverFits, Overloaded
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry, TokenRun
from tandem.router.admission.calibration import Promise
from tandem.router.admission.capacity import COMPLETION_TOKENS_LIKELY
from tandem.router.metrics.timeline import Timeline
from tandem.router.placement.choose import Placement, Work, WorkerSnapshot
from tandem.router.placement.costs import reuse
from tandem.router.request.migration_budget import LOSSES_MAX
from tandem.router.request.request import ClientRequest, Sampling

if TYPE_CHECKING:
    from tandem.net.store.registry import KvCompatibility

WORKER_SHARE = 0.98  # of the time that is left: the first token has its way back to the router
FIRST_TOKEN_MIN_S = 1e-3  # 0 says that no first token is too late


RETURNS_MAX = 4  # of one request by workers where it waited


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
    """A client's request with its prompt as token ids; it stays as it is."""

    client: ClientRequest
    seed: int
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    bad_words: list[list[int]] = field(default_factory=list)  # as runs of tokens
    grammar: str = ""  # of the completion; empty: any text
    cache_salt: bytes = b""
    adapter: Adapter | None = None  # None: the base model
    logprobs: int | None = None  # most likely tokens with each token; None: no log probabilities
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    block_size: int = 0  # of the workers; 0: not known
    pinned_tokens: int = 0  # of the prompt's first ones; 0: all, and the answer

    @property
    def storable_tokens(self) -> int:
        """Tokens of the prompt in full blocks, which are cached once they are computed; if only a
        part is pinned, of that."""
        size = self.block_size
        num_tokens = self.pinned_tokens or len(self.token_ids)
        return num_tokens // size * size if size else 0

    @property
    def retention(self) -> Retention:
        """The wishes for its KV, as a worker gets them."""
        return msgspec.structs.replace(self.client.wishes, num_tokens=self.pinned_tokens)

    def chain_root(self, compatibility: "KvCompatibility") -> bytes:
        """Returns the root of its block hashes."""
        return compatibility.chain_root(self.cache_salt, digest_of(self.adapter))


def prepare_request(
    client: ClientRequest,
    token_ids: list[int],
    *,
    limit: int,
    vocab_size: int,
    eos_token_ids: Collection[int],
    bad_words: list[list[int]],
    grammar: str,
    **placed: Any,
) -> PreparedRequest:
    """Returns a checked request whose prompt has `token_ids` and whose answer has at most `limit`
    tokens. `placed` has the fields that depend on where the request runs."""
    seed, logprobs = client.sampling.seed, client.logprobs
    if logprobs is None and client.num_sequences > client.n:
        logprobs = 0
    if client.use_beam_search:
        client = replace(client, sampling=Sampling(temperature=0.0))
        logprobs = 2 * client.n
    stop_token_ids = set(client.stop_token_ids)
    if grammar or not client.ignore_eos:  # only an end token can end what has a form
        stop_token_ids.update(eos_token_ids)
    return PreparedRequest(
        client=client,
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        token_ids=token_ids,
        max_tokens=max(1, limit),
        stop_token_ids=sorted(stop_token_ids),
        bad_words=[run for run in bad_words if max(run) < vocab_size],
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=client.prompt_logprobs,
        **placed,
    )


@dataclass(slots=True)
class Progress:
    """A request's tokens and times so far, wherever they were made."""

    block_hashes: list[bytes]  # of the prompt, later of what was made too, as far as it was needed
    timeline: Timeline
    output_token_ids: list[int] = field(default_factory=list)
    # Of the prompt from its second token on, if they were asked for.
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)  # the same: its last token's hidden state
    cached_tokens: int = 0  # of the prompt, where its first token was made
    cached_by_tier: CachedTokens | None = None  # None: no worker that made it has a tier
    timings: pb.SequenceTimings = field(default_factory=pb.SequenceTimings)
    attempts: set[int] = field(default_factory=set)  # numbers of those that made its tokens
    num_migrations: int = 0
    num_lost: int = 0  # workers, prefill or decode

    def take_source(self, update: pb.SequenceUpdate) -> None:
        """Takes whose tokens these are; the first one comes with the prompt's cached tokens."""
        if not (self.attempts or self.output_token_ids):  # a beam's job begins with tokens
            self._take_cached(update)
        self.attempts.add(update.attempt)

    def _take_cached(self, update: pb.SequenceUpdate) -> None:
        self.cached_tokens = update.cached_tokens
        if update.HasField("cached_by_tier"):
            told = update.cached_by_tier
            self.cached_by_tier = CachedTokens(
                device=told.device,
                host=told.host,
                disk=told.disk,
                store=told.store,
                peer=told.peer,
            )


@dataclass(frozen=True, slots=True)
class Routed:
    """A submission's workers, and why they were chosen."""

    placement: Placement
    matches: dict[str, int]  # that it was placed by
    reason: str  # in one line


@dataclass(slots=True)
class Routing:
    """A request's way to the workers: where it is, and where it may not go. Times are monotonic
    seconds."""

    routed: Routed | None = None
    lookup: Task[dict[str, int]] | None = None  # in the prefix tree, begun before its first placing
    num_submissions: int = 0
    asked: tuple[str, Prefill, float] | None = None  # a prefill worker: who, for what, when
    is_admitted: bool = False
    is_urgent: bool = False  # it is counted, and admitted however late its first token may be
    has_turn: bool = False  # it waits for no turn of its tenant
    promise: Promise | None = None  # of its first token, while none came and it did not migrate
    first_token_by: float = math.inf  # a later one is of no use, and workers may refuse it
    homeless_since: float | None = None  # no worker has it, and one had
    leaves: str = ""  # MIGRATING: id of the worker that it migrates off
    stays_until: float = -math.inf  # no worker was found for it to migrate to
    refused: set[str] = field(default_factory=set)  # epochs of workers that did not take it
    retry_after_s: float | None = None  # the shortest that a full worker named
    num_returns: int = 0  # by workers where it would have waited
    returned_by: str = ""  # epoch of the last of them, until it is placed again
    overloaded: Overloaded | None = None  # of a worker where its first token would be late
    # What a worker said that cannot take it, however long it waits.
    cannot_take: NeverFits | AdapterUnavailable | None = None

    def ask_all_again(self) -> None:
        """Workers that refused it may be asked once more."""
        self.refused.clear()
        self.retry_after_s = self.overloaded = None


@dataclass(slots=True)
class Job:
    """One completion on its way; `to` is the one place where its state changes.

    A request has one job or several (choices/). A job with a `parent` begins once that one's prompt
    is committed, or it is over: it is placed where the parent is, if it can be, and shares its KV.
    """

    request: PreparedRequest
    progress: Progress
    routing: Routing = field(default_factory=Routing)
    state: JobState = JobState.PLACING
    index: int = 0  # among the jobs of its request
    parent: "Job | None" = None
    may_fork: asyncio.Event = field(default_factory=asyncio.Event)  # others may begin

    def __post_init__(self) -> None:
        if self.request.client.hint is not None:  # the picker that sent it here has admitted it
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
        """The decode worker that it was submitted to last."""
        return self.routing.routed.placement.decode if self.routing.routed else None

    @property
    def is_budget_restarted(self) -> bool:
        """The blocks that its KV budget keeps were chosen again, by sums computed anew: it had
        tokens, and others came from another submission."""
        budget = self.request.client.kv_budget
        keeps_hitters = budget is not None and budget.keeps_hitters
        return keeps_hitters and len(self.progress.attempts) > 1

    @property
    def wanted(self) -> tuple[str, str]:
        """The decode worker that should run it, and the prefill worker that should compute its
        prompt: ids, empty where any may. A job stays near its parent; an endpoint picker chose for
        the first submission."""
        if self.parent is not None:
            worker = self.parent.worker
            return (worker.worker_id if worker else ""), ""
        hint = self.request.client.hint
        if hint is None or self.routing.num_submissions:
            return "", ""
        return hint.decode, hint.prefill

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the model's input: the prompt, and what was made of the answer."""
        return len(self.request.token_ids) + len(self.progress.output_token_ids)

    def hashes(self, compatibility: "KvCompatibility | None") -> list[bytes]:
        """Returns the hashes of all full blocks of the input; only the prompt's while no KV
        compatibility is known. There are none with a KV budget: such KV is not shared.
        """
        block_hashes = self.progress.block_hashes
        if self.request.client.kv_budget is not None:
            return block_hashes
        if compatibility is None or not self.progress.output_token_ids:
            return block_hashes
        size = compatibility.block_size
        parent = block_hashes[-1] if block_hashes else None
        for start in range(len(block_hashes) * size, self.num_tokens - size + 1, size):
            parent = parent or self.request.chain_root(compatibility)
            parent = block_hash(parent, self._tokens(start, start + size))
            block_hashes.append(parent)
        return block_hashes

    def _tokens(self, start: int, end: int) -> list[int]:
        """Returns a slice of the input, without a copy of all of it."""
        token_ids = self.request.token_ids
        output_token_ids = self.progress.output_token_ids
        prompt = len(token_ids)
        output = output_token_ids[max(0, start - prompt) : max(0, end - prompt)]
        return token_ids[start:end] + output


@dataclass(frozen=True, slots=True)
class JobStep:
    """New tokens of a job; `finish_reason` ("stop" or "length") only in the last step."""

    token_ids: list[int]
    finish_reason: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)  # one each, if they were asked for


def work_of(job: Job, block_size: int, completion_tokens: float = 0.0) -> Work:
    """Returns what placement needs to know. A request makes `completion_tokens` tokens here in the
    mean; 0: not known."""
    budget = job.request.client.kv_budget
    budget_tokens = None if budget is None else budget.tokens
    tokens_left = job.request.max_tokens - len(job.progress.output_token_ids)
    return Work(
        job.num_tokens,
        block_size,
        job.request.adapter,
        budget_tokens,
        min(tokens_left, completion_tokens or COMPLETION_TOKENS_LIKELY),
    )


def submission(
    job: Job,
    work: Work,
    placement: Placement,
    matches: Mapping[str, int],
    leaves: WorkerSnapshot | None = None,
) -> pb.SubmitSequence:
    """Builds the message; `leaves` is the worker it migrates off, still with all its blocks."""
    request = job.request
    progress = job.progress
    trace = progress.timeline.span.headers
    holders = [(w, matches[w.worker_id]) for w in placement.prefix_holders]
    if leaves is not None:
        holders.insert(0, (leaves, len(progress.block_hashes)))
    return pb.SubmitSequence(
        request_id=job.request_id,
        attempt=job.routing.num_submissions,
        input=sequence_input(request, progress.output_token_ids),
        prefill_candidates=[_candidate(work, w, matches) for w in placement.prefill_candidates],
        prefix_holders=[
            pb.PrefixHolder(
                worker_id=w.worker_id, epoch=w.epoch, address=w.address, num_blocks=num_blocks
            )
            for w, num_blocks in holders
        ],
        trace=pb.TraceContext(**trace) if trace else None,
        losses_max=max(1, LOSSES_MAX - progress.num_lost),
        fork_of=_fork_of(job, placement),
        first_token_s=_first_token_s(job),
        may_return=_may_return(job),
        sent_at_s=time.monotonic(),
    )


def sequence_input(
    request: PreparedRequest, output_token_ids: Sequence[int] = ()
) -> pb.SequenceInput:
    """Returns the request as an engine takes it, with the tokens that were made of its answer."""
    budget = request.client.kv_budget
    return pb.SequenceInput(
        token_ids=[*request.token_ids, *output_token_ids],
        num_prompt_tokens=len(request.token_ids),
        sampling=_sampling(request),
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        cache_salt=request.cache_salt,
        prompt_logprobs=request.prompt_logprobs,
        grammar=request.grammar,
        embed=request.client.embed,
        adapter=None if request.adapter is None else pb.Adapter(**asdict(request.adapter)),
        retention=pb.Retention(**asdict(request.retention)),
        kv_budget=None if budget is None else pb.SequenceKvBudget(**asdict(budget)),
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
    return pb.PrefillCandidate(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        address=worker.address,
        cached_blocks=cached_blocks,
        loaded_blocks=max(0, reused.num_tokens // work.block_size - cached_blocks),
        load_s=reused.load_s,
    )


def _fork_of(job: Job, placement: Placement) -> str:
    parent = job.parent
    if parent is None or (worker := parent.worker) is None:
        return ""
    return parent.request_id if worker.epoch == placement.decode.epoch else ""


def _sampling(request: PreparedRequest) -> pb.Sampling:
    sampling = request.client.sampling
    return pb.Sampling(
        temperature=sampling.effective_temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=request.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        bad_words=[TokenRun(ids=run) for run in request.bad_words],
        logprobs=request.logprobs,
    )
