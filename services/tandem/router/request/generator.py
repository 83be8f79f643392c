"""Runs a request through the router, from a checked ClientRequest to text and usage.

1. Prepare: The prompt is tokenized and its blocks are hashed, outside the event loop.
2. Dispatch: The request is placed and submitted to workers, and their tokens are received.
3. Convert: The tokens become text, up to a stop string, and are yielded as deltas.
Every request ends in exactly one outcome, which is counted in one place: stop, length, cancelled,
or the code of an error. The HTTP and gRPC APIs call this module and know nothing about workers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tandem.common.adapter import Adapter, digest_of
from tandem.common.config.router import RouterConfig
from tandem.errors import BadRequest, InternalError, NoWorkers, QueueFull, TandemError
from tandem.models.folder import ModelFolder
from tandem.models.scoring import Scorer
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem.net.observability.traces import NO_TRACING, Attributes, Tracing
from tandem.net.security.limits import Limits
from tandem.router.admission.tenants import cache_salt
from tandem.router.limits.meter import TenantMeter
from tandem.router.metrics.gen_ai import operation_of
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.timeline import Timeline
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.allowed import refusal
from tandem.router.request.choices.beams import BeamOptions, search
from tandem.router.request.choices.best_of import best_of
from tandem.router.request.choices.children import children
from tandem.router.request.choices.generation import Choice, Generation, Services
from tandem.router.request.choices.interleave import interleave, items_of
from tandem.router.request.delta import Delta
from tandem.router.request.dispatcher import Dispatcher
from tandem.router.request.early_differences import RecentPrompts
from tandem.router.request.job import Job, Progress, Routed, prepare_request
from tandem.router.request.keeper import Keeper
from tandem.router.request.log import RUNNING, RequestLog, RequestRecord
from tandem.router.request.prompt.formats import (
    wanted_form,
    with_template_options,
    without_effect,
)
from tandem.router.request.prompt.prompts import PromptPreparer
from tandem.router.request.request import (
    ClientRequest,
    check_model,
    check_token_ids,
)
from tandem.router.request.text import text_stream
from tandem.router.request.varying_lines import with_lines_moved
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

Task = Literal["generate", "embed", "classify", "score"]
# Task -> the routes for it, in the words of error messages
ROUTES: Mapping[Task, str] = {
    "generate": "chats and completions",
    "embed": "/v1/embeddings",
    "classify": "/v1/classify",
    "score": "/v1/score and /v1/rerank",
}

# Largest number of open requests. Each open request costs memory and time of the event loop.
REQUESTS_MAX = 4096
_TOO_MANY = (
    f"this router already has {REQUESTS_MAX} open requests, which is the maximum; try again later"
)
_NO_TRACE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The parts of the model that the router needs: its tokenizer and limits, not its weights."""

    folder: ModelFolder
    tokenizer: Tokenizer
    preparer: PromptPreparer
    model_format: ModelFormat
    created_s: int  # time when the model's files were written, in seconds since 1970
    # The model's own default values for sampling fields that clients omit.
    sampling: Mapping[str, float] = field(default_factory=dict)
    scorer: Scorer | None = None  # the head that scores texts; None: the model has none

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model can do for clients."""
        config = self.folder.config
        can: dict[Task, bool] = {
            "generate": config.generates,
            "embed": config.embeds,
            "classify": self.scorer is not None,
            "score": self.scorer is not None and self.scorer.ranks,
        }
        return tuple(task for task, is_able in can.items() if is_able)

    def check_task(self, task: Task) -> None:
        """Raises BadRequest if the model cannot do this."""
        if task not in self.tasks:
            served = ", ".join(ROUTES[each] for each in self.tasks)
            raise BadRequest(f"this model does not serve {ROUTES[task]}; it serves {served}")


@dataclass(slots=True)
class OpenRequests:
    """Counts the open requests of one kind."""

    num_running: int = 0
    num_waiting: int = 0  # requests without a first token; part of `num_running`


class Generator:
    """Generates the answers to all requests for one model. `model` is None until it is loaded."""

    def __init__(
        self,
        config: RouterConfig,
        view: ClusterView,
        dispatcher: Dispatcher,
        metrics: Metrics,
        tenants: TenantMeter,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.model: LoadedModel | None = None
        self.config = config
        self._view = view
        self.metrics = metrics
        self.tenants = tenants
        keeper = Keeper(view, config.answers.tool_pin_s)
        self._services = Services(
            dispatcher, metrics, tenants, config.autoscale, keeper, config.request_deadline_s
        )
        self._tracing = tracing
        self.requests = RequestLog()
        self._recent_prompts = RecentPrompts()
        self._num_running = 0
        self.lines = OpenRequests()  # lines of batches
        # Why this router refuses new requests, such as the end of the process. Running requests
        # continue. "": the router accepts new requests.
        self.end_reason = ""

    @property
    def served_name(self) -> str:
        if self.config.served_model_name or self.model is None:
            return self.config.served_model_name
        return self.model.folder.name

    def adapter(self, model: str) -> Adapter | None:
        """Returns the LoRA adapter with the model name `model`; None for the base model.

        Raises ModelNotFound if `model` is neither.
        """
        if model in ("", self.served_name):
            return None
        if (adapter := self._view.adapters().get(model)) is not None:
            return adapter
        check_model(model, served=self.served_name, aliases=self.config.model_aliases)
        return None

    def name_of(self, model: str) -> str:
        """Returns the model name to write into answers to requests for `model`."""
        return model if model in self._view.adapters() else self.served_name

    def with_defaults(self, request: ClientRequest) -> ClientRequest:
        """Returns the request with the model's defaults for omitted sampling fields."""
        return request if self.model is None else request.with_defaults(self.model.sampling)

    def without_effect(self, request: ClientRequest) -> list[str]:
        """Returns the names of the request's fields that this model's chat template does not
        read."""
        return [] if self.model is None else without_effect(self.model.model_format, request)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None until the model is loaded."""
        return None if self.model is None else self.model.tokenizer

    @property
    def adapters(self) -> list[Adapter]:
        """The LoRA adapters that requests may use, sorted by name."""
        return sorted(self._view.adapters().values(), key=lambda adapter: adapter.name)

    @property
    def num_running(self) -> int:
        """Number of requests that this router has accepted and not yet answered completely."""
        return self._num_running

    @property
    def max_model_len(self) -> int:
        """Largest number of prompt and completion tokens together; 0 until the model is loaded."""
        if self.model is None:
            return 0
        limits = [self.model.folder.config.max_model_len, self._view.max_model_len()]
        return min(limit for limit in limits if limit is not None)

    def not_ready_reason(self) -> str:
        """Returns why requests cannot be served; "" if they can."""
        if self.end_reason:
            return self.end_reason
        if self.model is None:
            return "the model is not loaded yet"
        if self._view.has_decode_worker():
            return ""
        known = self._view.known()
        if known and not any(self._view.is_compatible(w.record) for w in known):
            return "all workers serve another model than this router"
        return "no decode worker is ready"

    @asynccontextmanager
    async def without_workers(
        self, tenant: str, limits: Limits, number: int = 1
    ) -> AsyncIterator[Mapping[str, str]]:
        """Applies an API key's limits to `number` requests that need no worker, such as tokenize.

        The requests count as running during the `with` block, and use no tokens. Yields the headers
        `x-ratelimit-*`. Raises RateLimited.
        """
        async with AsyncExitStack() as held:
            reserved = [
                await held.enter_async_context(self.tenants.reserved(tenant, limits, 0))
                for _ in range(number)
            ]
            yield reserved[-1].headers
            for reservation in reserved:
                self.tenants.limiter.settle(reservation, 0)

    async def tokenize(self, request: ClientRequest) -> list[int]:
        """Returns the token ids of a prompt, which may fill the whole context.

        Raises the same errors as `generate` for a prompt that cannot be prepared or that exceeds
        the limits of its API key.
        """
        with self._place() as model:
            max_model_len = self.max_model_len
            self.adapter(request.model)
            vocab_size = model.folder.config.vocab_size
            request.check_against(vocab_size=vocab_size, max_model_len=max_model_len)
            request = self._as_template_input(request, model)
            prepare = model.preparer.prepare
            token_ids = (await prepare(request, None, max_model_len=max_model_len)).token_ids
            request.check_prompt_limit(len(token_ids))
            return token_ids

    def _as_template_input(self, request: ClientRequest, model: LoadedModel) -> ClientRequest:
        request = with_template_options(model.model_format, request)
        return with_lines_moved(request) if self.config.varying_lines == "move" else request

    async def detokenize(
        self, token_ids: list[int], *, tenant: str, skip_special_tokens: bool
    ) -> str:
        """Returns the text of token ids.

        Raises BadRequest for ids outside the vocabulary or for more ids than the context length.
        """
        with self._place() as model:
            if len(token_ids) > self.max_model_len:
                raise refusal("tokens", why=f"a list of {len(token_ids)} token ids")
            check_token_ids("tokens", token_ids, model.folder.config.vocab_size)
            return await model.preparer.decode(
                token_ids, tenant=tenant, skip_special_tokens=skip_special_tokens
            )

    @contextmanager
    def _place(self) -> Iterator[LoadedModel]:
        """Counts a request that needs no worker as an open request during the `with` block.

        Yields the model. Raises NoWorkers and QueueFull.
        """
        if self.model is None:
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        if self._num_running >= REQUESTS_MAX:
            raise QueueFull(_TOO_MANY, retry_after_s=1.0)
        self._num_running += 1
        try:
            yield self.model
        finally:
            self._num_running -= 1

    async def generate(
        self,
        request: ClientRequest,
        trace: Mapping[str, str] = _NO_TRACE,
        together: BodyRequests | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of the answer, at least one. Closing the generator cancels the request.

        `trace` has the client's headers `traceparent` and `tracestate`. `together` is the state
        that the requests of one HTTP body share; None if the body has only this request. Raises
        only errors of services/tandem/errors.py.
        """
        together = together or self.together()
        request = self.with_defaults(request)
        record = self._open(request, trace)
        reasons: set[str] = set()
        counts = self.lines if request.is_batch else OpenRequests()
        counts.num_running += 1
        counts.num_waiting += 1
        is_waiting = True
        self._num_running += 1
        self.metrics.requests_running.inc()
        try:
            if self._num_running > REQUESTS_MAX:
                raise QueueFull(_TOO_MANY, retry_after_s=1.0)
            async with aclosing(self._run(request, record, together)) as deltas:
                async for delta in deltas:
                    if is_waiting:
                        is_waiting = False
                        counts.num_waiting -= 1
                    if delta.finish_reason:
                        reasons.add(delta.finish_reason)
                    if delta.total is not None:
                        record.outcome = "length" if "length" in reasons else "stop"
                    yield delta
        except TandemError as error:
            record.fail(error)
            if error.http_status in (429, 503):
                self._view.events.count("refused", error.code, "ended with an error")
            raise
        except Exception as error:
            about = {"request_id": request.request_id}
            log.exception(
                "request %s failed because of an error in the router",
                request.request_id,
                extra=about,
            )
            hidden = InternalError(
                f"an internal error of the router ({type(error).__name__}); the router's log "
                "shows the cause"
            )
            record.fail(hidden)
            raise hidden from error
        finally:
            if record.outcome == RUNNING:
                record.outcome = "cancelled"
            counts.num_running -= 1
            counts.num_waiting -= is_waiting
            self._num_running -= 1
            record.end()
            self.metrics.on_end(record)

    def together(self, num_requests: int = 1) -> BodyRequests:
        """Creates the state that the requests of one HTTP body share, one request per prompt."""
        return BodyRequests(num_requests, logprobs_max=self.config.logprobs_max)

    def _open(self, request: ClientRequest, trace: Mapping[str, str]) -> RequestRecord:
        operation = operation_of(request.kind)
        model = self.name_of(request.model)
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.response.id": request.request_id,
            "tandem.client_request_id": request.client_id,
            "gen_ai.request.temperature": request.sampling.temperature,
        }
        span = self._tracing.begin(f"{operation} {model}", trace, attributes)
        record = RequestRecord(request.request_id, request.kind, Timeline(span), request.tenant)
        record.model = model
        record.client_id = request.client_id
        record.session = request.session
        record.priority = request.claim.priority
        self.requests.open(record)
        return record

    async def _run(
        self, request: ClientRequest, record: RequestRecord, together: BodyRequests
    ) -> AsyncGenerator[Delta, None]:
        model = self.model
        if model is None:
            raise NoWorkers("the model is not loaded yet", retry_after_s=1.0)
        # A line of a batch may wait for spare capacity until the batch's window ends.
        left_s = math.inf if request.is_batch else self.config.request_deadline_s
        deadline = asyncio.get_running_loop().time() + left_s
        async with AsyncExitStack() as held:
            with record.timeline.stage("tokenize"):
                job = await self.prepare(request, model, record.timeline, together)
                record.early_difference = self._recent_prompts.compare(
                    job.request.cache_salt + digest_of(job.request.adapter).encode(),
                    job.request.token_ids,
                )
                generated_max = job.request.max_tokens * request.num_sequences
                # The look-up in the prefix tree and the check of the tenant's limits are both calls
                # to Redis. They run at the same time.
                are_counted = request.limits.are_counted
                with self._services.dispatcher.looking_up(job) if are_counted else nullcontext():
                    reservation = await held.enter_async_context(
                        self.tenants.reserved(
                            request.tenant,
                            request.limits,
                            len(job.request.token_ids) + generated_max,
                        )
                    )
                await together.begin()
            num_jobs = 1 if request.use_beam_search else request.num_sequences
            record.jobs = children(job, num_jobs)
            job.on_admitted = partial(together.note_admitted, job, reservation.headers)
            generation = Generation(
                self._services,
                record,
                reservation,
                num_choices=request.num_sequences,
                deadline=deadline,
            )
            held.callback(generation.settle)
            choices = [
                Choice(
                    index,
                    record.jobs[index % num_jobs],
                    text_stream(model.tokenizer, model.model_format, job.request),
                )
                for index in range(request.num_sequences)
            ]
            deltas = _deltas(generation, choices, request, model)
            await held.enter_async_context(aclosing(deltas))
            async for delta in deltas:
                yield delta

    async def prepare(
        self,
        request: ClientRequest,
        model: LoadedModel,
        timeline: Timeline,
        together: BodyRequests,
    ) -> Job:
        """Returns the job of a request, with its prompt as tokens. Raises BadRequest."""
        if not request.embed:
            model.check_task("generate")
        max_model_len = self.max_model_len
        vocab_size = model.folder.config.vocab_size
        adapter = self.adapter(request.model)
        request.check_against(vocab_size=vocab_size, max_model_len=max_model_len)
        request = self._as_template_input(request, model)
        salt = cache_salt(self.config.cluster.token, request.tenant, request.cache_salt)
        compatibility = self._view.compatibility()
        prepared = await model.preparer.prepare(
            request,
            compatibility.chain(salt, digest_of(adapter)) if compatibility else None,
            max_model_len=max_model_len,
        )
        token_ids = prepared.token_ids
        pool_tokens = pool_tokens_of(request, self._view.pool_tokens(), self.config)
        max_tokens = request.resolved_max_tokens(
            len(token_ids), max_model_len, pool_tokens=pool_tokens
        )
        max_tokens = together.reserve_logprobs(request, len(token_ids), max_tokens)
        bad_words = await model.preparer.bad_words(request)
        grammar = await model.preparer.grammar(
            wanted_form(model.model_format, request, token_ids), request.tenant
        )
        checked = prepare_request(
            request,
            token_ids,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            eos_token_ids=model.tokenizer.eos_token_ids,
            bad_words=bad_words,
            grammar=grammar,
            cache_salt=salt,
            adapter=adapter,
            block_size=compatibility.block_size if compatibility else 0,
            pinned_tokens=prepared.pinned_tokens,
            system_tokens=prepared.system_tokens,
            images=prepared.images,
        )
        return Job(checked, Progress(prepared.block_hashes, timeline))


def _deltas(
    generation: Generation,
    choices: Sequence[Choice],
    request: ClientRequest,
    model: LoadedModel,
) -> AsyncGenerator[Delta, None]:
    """Returns the deltas of all choices.

    With beam search or `best_of`, the first delta comes after all completions have ended. Otherwise
    each delta comes as soon as it is generated.
    """
    if request.use_beam_search:
        return _beams(generation, choices, request, model)
    if len(choices) == 1:
        return generation.follow(choices[0])
    deltas = items_of(interleave([generation.follow(choice) for choice in choices]))
    if len(choices) == request.sampling.n:
        return deltas
    sampling = request.sampling
    return best_of(deltas, sampling.n, shows_logprobs=sampling.logprobs is not None)


async def _beams(
    generation: Generation,
    choices: Sequence[Choice],
    request: ClientRequest,
    model: LoadedModel,
) -> AsyncGenerator[Delta, None]:
    ends = model.tokenizer.eos_token_ids
    options = BeamOptions(
        request.sampling.n, request.length_penalty, ends, request.sampling.ignore_eos
    )
    beams = await search(choices[0].job, options, generation.steps)
    for choice, beam in zip(choices, beams, strict=True):
        finish_reason = "stop" if beam.is_ended else "length"
        yield generation.whole(choice, list(beam.token_ids), finish_reason)


def pool_tokens_of(
    request: ClientRequest, pool_tokens: int | None, config: RouterConfig
) -> int | None:
    """Returns the limit that a KV pool of `pool_tokens` tokens sets to the request's tokens.

    None means no limit: a request with a KV budget of at most half the pool always fits, because
    the request never occupies much more than its budget. Raises BadRequest if the request has a KV
    budget and the operator does not allow KV budgets.
    """
    budget = request.kv_budget
    if budget is not None and config.kv_budgets == "refuse":
        raise BadRequest(
            "kv_budget is not allowed on this cluster (--kv-budgets refuse); leave it out",
            param="kv_budget",
        )
    if budget is None or pool_tokens is None:
        return pool_tokens
    return None if 2 * budget.tokens <= pool_tokens else pool_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """What is known about a request when a worker has admitted it."""

    limit_headers: Mapping[str, str]  # headers `x-ratelimit-*`
    routed: Routed | None


class BodyRequests:
    """The state that the requests of one HTTP body share. Each prompt of the body is one request.

    No request is placed before all requests of the body are prepared, so that one invalid prompt
    fails the whole body before anything is generated.

    The answer to the body may have at most `logprobs_max` log probabilities, because an answer that
    is not streamed is built in memory. Example: a prompt of 1,000 tokens is answered with 8 choices
    and prompt_logprobs 5. Each choice repeats 1 + 5 log probabilities for each prompt token, so the
    answer has 8 x 1,000 x 6 = 48,000 log probabilities.
    """

    def __init__(self, num_requests: int = 1, *, logprobs_max: int) -> None:
        # This event is set when workers have admitted all requests.
        self.all_admitted = asyncio.Event()
        self._all_prepared = asyncio.Barrier(num_requests)
        self._admitted: dict[str, Admission] = {}  # by request id
        self._num_requests = num_requests
        self._logprobs_max = logprobs_max
        self._num_logprobs = 0

    async def begin(self) -> None:
        """Waits until all requests of the HTTP body are prepared."""
        await self._all_prepared.wait()

    def note_admitted(self, job: Job, limit_headers: Mapping[str, str]) -> None:
        """Records that a worker has admitted the job of a request."""
        self._admitted.setdefault(job.request_id, Admission(limit_headers, job.routing.routed))
        if len(self._admitted) == self._num_requests:
            self.all_admitted.set()

    @property
    def admission(self) -> Admission:
        """The admission of the request that was admitted first."""
        return next(iter(self._admitted.values()))

    def reserve_logprobs(
        self, request: ClientRequest, num_prompt_tokens: int, max_tokens: int
    ) -> int:
        """Reserves the log probabilities of one request within `logprobs_max`.

        Returns the largest number of completion tokens that the request may generate. If the client
        set max_tokens, this is `max_tokens`. Otherwise the result may be smaller than `max_tokens`,
        so that the answer does not exceed `logprobs_max`. Raises BadRequest if the answer would
        have too many log probabilities.
        """
        of_token = request.num_logprobs_kept
        needed = self._num_logprobs + request.num_prompt_logprobs * num_prompt_tokens
        least = max_tokens
        if of_token and request.sampling.max_tokens is None:
            max_tokens = min(max_tokens, (self._logprobs_max - needed) // of_token)
            least = max(1, request.sampling.min_tokens)
        needed += of_token * max(max_tokens, least)
        if needed > self._logprobs_max:
            name = "prompt_logprobs" if request.sampling.prompt_logprobs is not None else "logprobs"
            if request.echoes_prompt and request.sampling.logprobs is not None:
                name = "logprobs"
            raise BadRequest(
                f"{name} asks for at least {needed} log probabilities; one answer may have at "
                f"most {self._logprobs_max}, over all prompts and choices of the request. Ask "
                "for fewer log probabilities, tokens, choices or prompts",
                param=name,
            )
        self._num_logprobs = needed
        return max_tokens
