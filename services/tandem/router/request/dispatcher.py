"""Runs jobs on decode workers until they end: places, submits, migrates and cancels them.

job.py describes the states of a job.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

from tandem.common.config.router import RouterConfig
from tandem.common.perf_model.predict import NO_PREFILL, Prefill
from tandem.errors import (
    NeverFits,
    NoWorkers,
    Overloaded,
    TandemError,
    WorkerLost,
)
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.net.store.client import UNREACHABLE
from tandem.router.admission.controller import AdmissionController
from tandem.router.admission.predict import computing_worker
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work, choose
from tandem.router.placement.reasons import reason_of
from tandem.router.request.job import Job, JobState, JobStep, Routed, submission, work_of
from tandem.router.request.migration_budget import LOSSES_MAX
from tandem.router.request.migrations import (
    REFUSALS,
    RETRY_AFTER_DEFAULT_S,
    Migrations,
    lost_for_good,
    raise_if_refused,
)
from tandem.router.workers.attempt import Attempt
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.returns import Returns

log = logging.getLogger(__name__)
T = TypeVar("T")
_OnPlaced = Callable[[Job, Work, Placement, dict[str, int]], T]

# A request whose max_tokens leaves at most this many tokens to generate does not migrate from a
# draining worker, because it ends sooner if it stays.
FINISH_TOKENS = 32
# A line of a batch with at most this many tokens to generate does not stop for other requests.
ASIDE_TOKENS = 2
MIGRATE_AGAIN_S = 1.0
_RETRY_AFTER_S = 1.0


class SpareCapacity(Protocol):
    """Says when lines of batches must leave their worker to other requests."""

    def is_short(self) -> bool:
        """Returns whether a line that runs should stop now."""

    async def wait(self) -> None:
        """Returns when a line that has stopped may go on."""


class NoLines:
    """The spare capacity of a router without batches."""

    def is_short(self) -> bool:
        return False

    async def wait(self) -> None:
        return None


class Dispatcher:
    """Runs the jobs of all requests of a router: places, submits, follows and migrates them."""

    def __init__(
        self,
        config: RouterConfig,
        view: ClusterView,
        match: Callable[[list[bytes]], Awaitable[dict[str, int]]],
        metrics: Metrics,
        on_end: Callable[[Job], None],
        have_tenants: Callable[[], bool],
    ) -> None:
        """Creates the dispatcher of one router.

        - `match` looks up block hashes in the prefix tree. It returns id of a worker or tier ->
          number of leading blocks held there.
        - `on_end` is called for each successful job that has no parent.
        - `have_tenants` returns whether requests may have tenants. Only then do tenants take turns.
        """
        self._config = config
        self._view = view
        self._look_up = match
        self._metrics = metrics
        self._rng = random.Random()
        self._on_end = on_end
        self._pending = PendingQueue(config, view, metrics)
        self.admission = AdmissionController(config, view, metrics, have_tenants=have_tenants)
        self._migrations = Migrations(metrics, view.events)
        self._returns = Returns(view)
        self.spare: SpareCapacity = NoLines()

    @property
    def num_pending(self) -> int:
        """Number of requests that wait because no decode worker is ready."""
        return self._pending.num_pending

    @contextmanager
    def looking_up(self, job: Job) -> Iterator[None]:
        """Looks up the job's blocks in the prefix tree in the background of the `with` block.

        The first placement of the job waits for the result. An error in the `with` block cancels
        the look-up.
        """
        hashes = job.hashes(self._view.compatibility())
        job.routing.lookup = lookup = asyncio.create_task(self._match(hashes), name="lookup")
        try:
            yield
        except BaseException:
            lookup.cancel()
            raise

    async def run(self, job: Job) -> AsyncGenerator[JobStep, None]:
        """Yields the job's steps until the job ends. Closing the iterator cancels the job.

        Raises Overloaded, QueueFull, NoWorkers, WorkerLost or the worker's error.
        """
        self._migrations.budget.begin()
        try:
            await self._wait_for_parent(job)
            attempt = await self._submit(job)
            try:
                while True:
                    try:
                        async for step in self._follow(job, attempt):
                            yield step
                        return
                    except _Migrate:
                        attempt = await self._migrate(job, attempt)
                        continue
                    except _StepAside:
                        # The worker keeps the job's full blocks as cached ones, so little is
                        # computed again when the job goes on, as after a loss of its worker.
                        attempt.close()
                        await self.spare.wait()
                    except REFUSALS as error:
                        self._note_refusal(job, error)
                    except WorkerLost as error:
                        self._migrations.note_loss(job, error)
                    job.to(JobState.PLACING)
                    attempt.close()
                    attempt = await self._submit(job)
            finally:
                attempt.close()
        except Exception:
            if not job.is_over:
                job.to(JobState.FAILED)
            raise
        finally:
            if not job.is_over:
                job.to(JobState.CANCELLED)
            job.may_fork.set()
            self._note_prefilled(job)
            self._settle(job)
            self._migrations.budget.end(time.monotonic())

    def _settle(self, job: Job) -> None:
        """Corrects what a request has counted for its tenant, when the request has ended or has
        left its turn: nothing if no worker got it.

        Of several completions, each counts as long as the first one.
        """
        routing = job.routing
        if routing.claim is not None and routing.is_charged:
            routing.is_charged = False
            num_tokens = len(job.progress.output_token_ids)
            self.admission.settle(
                routing.claim,
                tokens_missing=routing.tokens_missing if routing.num_submissions else 0,
                num_completion=num_tokens * job.request.client.num_sequences,
            )

    async def _wait_for_parent(self, job: Job) -> None:
        if job.parent is not None:
            await job.parent.may_fork.wait()
            # The whole request was admitted with the parent. So if all workers are full, a child
            # waits; it is not refused.
            job.routing.unassigned_since = time.monotonic()
            job.routing.is_admitted = True

    async def _submit(self, job: Job) -> Attempt:
        """Submits the job. Waits while no decode worker is usable.

        If all workers are full, a new job is refused. A job that a worker accepted before waits.
        """
        routing = job.routing
        while True:
            try:
                if (attempt := await self._try_submit(job)) is not None:
                    job.to(JobState.SUBMITTED)
                    return attempt
                is_begun = routing.unassigned_since is not None
                job.to(JobState.PENDING)
                with job.progress.timeline.stage("queue"):
                    await self._pending.wait(
                        frozenset(routing.refused), is_begun=is_begun, until=job.deadline
                    )
                job.to(JobState.PLACING)
            except REFUSALS as error:
                left_s = job.deadline - time.monotonic()
                if routing.unassigned_since is None or left_s <= 0:
                    raise
                waited_s = time.monotonic() - routing.unassigned_since
                if isinstance(error, NoWorkers) or waited_s > self._config.hold_deadline_s:
                    if job.parent is not None and not job.progress.num_lost:
                        raise
                    raise lost_for_good(
                        job, f"no other worker accepted the request; {error.message}"
                    ) from error
                pause_s = min(error.retry_after_s or math.inf, RETRY_AFTER_DEFAULT_S)
                await asyncio.sleep(min(pause_s, left_s))
                routing.clear_refusals()

    async def place(self, job: Job) -> Placement | None:
        """Chooses the workers of a job that another process will submit.

        Until `note_elsewhere` is called, the job's prompt counts as load of the prefill worker, and
        the predicted number of tokens counts for the tenant. Returns None if no decode worker is
        usable. Raises QueueFull, Overloaded and AdapterUnavailable.
        """
        placement = None
        try:
            placement = await self._place(job, self._count_in)
        finally:
            if placement is None:
                self._settle(job)
        return placement

    def note_elsewhere(self, job: Job, *, has_token: bool) -> None:
        """Records that a job placed by `place` has its first token or has ended without one.

        This process does not learn how many tokens follow the first one, so the predicted number
        counts. Without a first token, only the prompt counts. Further calls have no effect.
        """
        self._note_prefilled(
            job,
            job.routing.requested_prefill[0] if has_token and job.routing.requested_prefill else "",
        )
        if has_token:
            job.routing.is_charged = False
        self._settle(job)

    async def _try_submit(self, job: Job) -> Attempt | None:
        """Places and submits the job once. Returns None if no decode worker is usable.

        Raises QueueFull and Overloaded.
        """
        return await self._place(job, self._send)

    async def _place(self, job: Job, on_placed: _OnPlaced[T]) -> T | None:
        """Places the job, calls `on_placed` with the placement, and returns the call's result.

        Returns None if no decode worker is usable.
        """
        compatibility = self._view.compatibility()
        block_size = compatibility.block_size if compatibility else 16
        work = work_of(job, block_size, self._metrics.demand.output_tokens_mean)
        timeline = job.progress.timeline
        with timeline.stage("route"):
            block_hashes = job.hashes(compatibility)
            lookup = job.routing.lookup
            job.routing.lookup = None
            matches = await (lookup or self._match(block_hashes))
            turn = self._turn(job, work, matches)  # with the first session, requests take turns
            waits = not job.routing.has_turn and self.admission.must_wait()
        if waits and job.parent is None and not job.routing.num_submissions:
            job.to(JobState.WAITING)
        async with timeline.queueing(turn):
            job.routing.is_charged = job.routing.claim is not None
            if job.state is JobState.WAITING:
                job.to(JobState.PLACING)
            with timeline.stage("route"):
                if waits:
                    matches = await self._match(block_hashes)
                if job.parent is not None and (worker := job.parent.worker) is not None:
                    matches = {**matches, worker.worker_id: len(block_hashes)}
                placement = self._choose(job, work, matches)
                if placement is None:
                    if not job.routing.num_submissions:
                        # The request has another turn when a decode worker is ready.
                        self._settle(job)
                    return None
                self._admit(job, work, placement, again=job.routing.is_in_turn)
                job.routing.is_in_turn = False
                return on_placed(job, work, placement, matches)

    async def _migrate(self, job: Job, old: Attempt) -> Attempt:
        """Moves a running job from a draining worker to another worker.

        The new worker pulls the job's KV blocks from the draining worker, which meanwhile continues
        to generate tokens (attempt `old`). Returns the attempt whose tokens are used from now on.
        This is `old` if `old` finishes first or no other worker accepts the job, else the new
        attempt.
        """
        job.to(JobState.MIGRATING)
        routing = job.routing
        before = routing.routed
        assert before is not None
        routing.leaves = old.worker_id
        # Do not place the job on the worker of `old` again, because `old` still runs there.
        routing.refused.add(before.placement.decode.epoch)
        new: Attempt | None = None
        is_migrated = False
        try:
            while (new := await self._try_submit(job)) is not None:
                await new.news_or_end_of(old)
                is_migrated = not old.is_finished and (new.failure is None or old.is_over)
                if is_migrated or old.is_finished or new.failure is None:
                    break
                new.close()
                if not self._migrations.may_try_another(job, new.failure):
                    break
        except REFUSALS as error:
            log.debug("request %s stays on its draining worker: %s", job.request_id, error)
        finally:
            job.to(JobState.SUBMITTED)
            routing.leaves = ""
            routing.clear_refusals()
            routing.unassigned_since = None
            if not is_migrated:
                routing.routed = before
                may_lose_more = job.progress.num_lost < LOSSES_MAX
                again_s = MIGRATE_AGAIN_S if may_lose_more else math.inf
                routing.stays_until = time.monotonic() + again_s
                if new is not None:
                    new.close()
        if not is_migrated or new is None:
            return old
        old.close()
        self._migrations.note_migration(
            job, "drain", f"worker {old.worker_id} drains", off=old.worker_id
        )
        return new

    def _send(self, job: Job, work: Work, placement: Placement, matches: dict[str, int]) -> Attempt:
        """Submits the job to the decode worker of the placement.

        The caller must not await between the choice of the worker and this call. So the worker is
        still in the cluster view.
        """
        client = self._view.client(placement.decode.worker_id)
        assert client is not None
        leaves = self._view.roster().by_id.get(job.routing.leaves)
        message = submission(job, work, placement, matches, leaves)
        self._count_in(job, work, placement, matches)
        is_local = job.routing.requested_prefill is None
        is_load = is_local and not job.request.is_batch  # no prompt waits for that of a line
        prefill = _prefill_of(work, placement) if is_load else NO_PREFILL
        return client.submit(message, prefill=prefill)

    def _count_in(
        self, job: Job, work: Work, placement: Placement, matches: dict[str, int]
    ) -> Placement:
        """Records a job's placement, and adds the job's work to the load of the chosen workers."""
        self._note_prefilled(job)
        job.routing.num_submissions += 1
        kind = reason_of(work, placement)
        job.routing.routed = routed = Routed(placement, matches, kind)
        self._metrics.placements.labels(reason=kind).inc()
        job.progress.timeline.submit()
        if log.isEnabledFor(logging.DEBUG):
            about_request = {"request_id": job.request_id}
            log.debug(
                "request %s is placed: %s", job.request_id, routed.reason, extra=about_request
            )
        if job.request.is_batch:
            return placement
        self._view.note_share(placement.prefill_worker.worker_id, placement.prefill_s(work))
        computing = computing_worker(work, placement)
        if computing.role == "prefill":
            prefill = _prefill_of(work, placement)
            sent_at = self._view.note_prefill(computing.worker_id, prefill)
            job.routing.requested_prefill = computing.worker_id, prefill, sent_at
        return placement

    def _note_refusal(self, job: Job, error: TandemError) -> None:
        self._migrations.note_refusal(job, error)
        if isinstance(error, NeverFits) and (routed := job.routing.routed) is not None:
            # Workers with an equal or smaller KV pool cannot hold the request either.
            size = routed.placement.decode.load.longest_sequence
            workers = self._view.snapshots()
            job.routing.refused |= {w.epoch for w in workers if 0 < w.load.longest_sequence <= size}

    def _note_prefilled(self, job: Job, by: str = "") -> None:
        """Stops counting the job's prompt as load of the prefill worker.

        `by` is the id of the worker that computed the prompt; "" if no worker did. Further calls
        have no effect.
        """
        if job.routing.requested_prefill is not None:
            worker_id, prefill, sent_at = job.routing.requested_prefill
            job.routing.requested_prefill = None
            self._view.note_prefilled(worker_id, prefill, sent_at, by_it=by == worker_id)

    async def _follow(self, job: Job, attempt: Attempt) -> AsyncGenerator[JobStep, None]:
        progress = job.progress
        routing = job.routing
        while True:
            token_ids: list[int] = []
            logprobs: list[LogprobEntry] = []
            finish_reason = ""
            # `updates` returns all received updates before it raises the attempt's failure.
            for update in await attempt.updates():
                progress.take_timings(update, attempt.worker_id)
                if update.is_admitted:
                    job.on_admitted()
                if update.token_ids:
                    progress.take_source(update)
                    by = update.timings.prefill_worker_id or attempt.worker_id
                    self._note_prefilled(job, by)
                    if routing.promise is not None and routing.num_submissions == 1:
                        self.admission.note_first_token(routing.promise)
                    routing.promise = None
                    num_before = len(progress.output_token_ids) + len(token_ids)
                    token_ids.extend(update.token_ids)
                    logprobs.extend(update.logprobs)
                    progress.prompt_logprobs.extend(update.prompt_logprobs)
                    progress.embedding.extend(update.embedding)
                    if update.HasField("timings"):
                        progress.timeline.take(update.timings, num_before)
                        if num_before == 0:
                            self.admission.note_wire(progress.timeline.wire_s)
                        # When the second token arrives, all blocks of the prompt have been pulled.
                        # With speculation, further tokens may arrive with it.
                        if num_before == 1:
                            pulled = update.timings
                            self._metrics.flows.note_pull(
                                pulled.prefill_worker_id, attempt.worker_id, pulled.blocks_pulled
                            )
                # `is_committed` says that the worker has all KV of the prompt. Workers of older
                # versions do not send this field, but their second token shows the same.
                if update.is_committed or len(progress.output_token_ids) + len(token_ids) > 1:
                    job.may_fork.set()
                if update.workers_lost > attempt.num_lost:
                    progress.num_lost += update.workers_lost - attempt.num_lost
                    attempt.num_lost = update.workers_lost
                if update.finish_reason not in ("", "error"):
                    finish_reason = update.finish_reason
                    progress.timings = update.timings
            if token_ids or finish_reason:
                routing.unassigned_since = None
                routing.first_token_by = math.inf
                progress.output_token_ids.extend(token_ids)
                # Set the state ENDED before the last step is yielded, because the caller may not
                # resume this generator after that step.
                if finish_reason:
                    # `on_end` compares the prefix tree's prediction with the tokens that were
                    # cached. For a job with a parent, the prediction is not from the prefix tree
                    # alone: the parent's blocks were added to it.
                    if job.parent is None:
                        self._on_end(job)
                    job.to(JobState.ENDED)
                yield JobStep(token_ids, finish_reason, logprobs)
            if finish_reason:
                return
            if attempt.is_draining and not attempt.is_over and self._may_migrate(job):
                raise _Migrate
            if job.request.client.is_batch and self._may_step_aside(job):
                raise _StepAside

    def _may_migrate(self, job: Job) -> bool:
        return (
            job.request.max_tokens - len(job.progress.output_token_ids) > FINISH_TOKENS
            and time.monotonic() >= job.routing.stays_until
            and self._view.has_decode_worker()
        )

    def _may_step_aside(self, job: Job) -> bool:
        # A request with a budget of KV, or with several completions, would lose more than its time.
        num_left = job.request.max_tokens - len(job.progress.output_token_ids)
        return (
            num_left > ASIDE_TOKENS
            and bool(job.progress.output_token_ids)
            and job.may_fork.is_set()
            and job.request.kv_budget is None
            and job.request.client.num_sequences == 1
            and self.spare.is_short()
        )

    def _choose(self, job: Job, work: Work, matches: dict[str, int]) -> Placement | None:
        """Returns a placement; None while no decode worker is usable.

        Raises Overloaded or QueueFull if all workers have refused the job because of their load.
        Raises NeverFits or AdapterUnavailable if a worker refused a new job for good. For a job
        that a worker accepted before, the result is None instead, so that the job waits: a worker
        that can run the job may come back.
        """
        routing = job.routing
        refused = frozenset(routing.refused)
        required_decode, required_prefill = job.required_workers
        roster = self._view.roster()
        placement = None
        if routing.returned_by:  # prefer all other workers to the worker that returned the job
            avoided = refused | {routing.returned_by}
            placement = choose(work, roster, matches, self._rng, refused=avoided)
            routing.returned_by = ""
        placement = placement or choose(
            work,
            roster,
            matches,
            self._rng,
            refused=refused,
            required_decode=required_decode,
            required_prefill=required_prefill,
        )
        if placement is None:
            raise_if_refused(job, work.adapter, partial(self._view.has_decode_worker, refused))
        return placement

    def _turn(
        self, job: Job, work: Work, matches: dict[str, int]
    ) -> AbstractAsyncContextManager[None]:
        """Returns a context manager that waits for the request's turn.

        Only the first submission of a request waits. A job that is submitted again has waited
        already, and so has the parent of a child.
        """
        if job.routing.num_submissions or job.parent is not None or job.routing.has_turn:
            return nullcontext()
        depth = max(matches.values(), default=0) * work.block_size
        job.routing.tokens_missing = missing = max(0, work.num_tokens - depth)
        claim = self.admission.claim(
            job.request.client.claim,
            tokens_missing=missing,
            completion_max=job.request.max_tokens * job.request.client.num_sequences,
        )
        job.routing.claim = claim if self.admission.take_turns else None
        if self.admission.must_wait() and (placement := self._choose(job, work, matches)):
            self._admit(job, work, placement)
            job.routing.is_in_turn = True
        until = min(job.routing.first_token_by, job.deadline)
        return self.admission.turn(claim, until=until)

    def _admit(self, job: Job, work: Work, placement: Placement, *, again: bool = False) -> None:
        """Admits a request that was not admitted before, or `again` after it has waited.

        Raises Overloaded.
        """
        if again or not job.routing.is_admitted:
            began_s = job.progress.timeline.began_s
            decision = self.admission.admit(
                work,
                placement,
                claim=job.routing.claim or job.request.client.claim,
                is_urgent=job.routing.is_urgent,
                waited_s=time.monotonic() - began_s,
                again=again,
                deadline_s=job.request.client.deadline_s,
            )
            job.routing.promise = decision.promise
            within_s = min(decision.within_s, job.request.client.deadline_s or math.inf)
            job.routing.first_token_by = began_s + within_s - self.admission.wire_s
            job.routing.is_admitted = True

    async def _match(self, block_hashes: list[bytes]) -> dict[str, int]:
        if not block_hashes:
            return {}
        try:
            async with asyncio.timeout(self._config.lookup_deadline_s):
                return await self._look_up(block_hashes)
        except UNREACHABLE as error:
            self._metrics.lookups_failed.inc()
            log.debug(
                "a request is placed without the prefix tree, which does not answer: %r", error
            )
            return {}


def _prefill_of(work: Work, placement: Placement) -> Prefill:
    missing = placement.tokens_missing
    return Prefill.of(missing, work.num_tokens - missing)


class _Migrate(Exception):
    """Signals that the job's worker drains, so the job should move to another worker."""


class _StepAside(Exception):
    """Signals that the job is a line of a batch, and that other requests need its place."""


class PendingQueue:
    """The queue of jobs that wait because no decode worker is usable."""

    def __init__(self, config: RouterConfig, view: ClusterView, metrics: Metrics) -> None:
        self._config = config
        self._view = view
        self._metrics = metrics
        self.num_pending = 0

    async def wait(
        self, refused: frozenset[str], *, is_begun: bool, until: float = math.inf
    ) -> None:
        """Waits until a decode worker whose epoch is not in `refused` is usable.

        Raises Overloaded at the monotonic time `until`, the request's own deadline, and NoWorkers
        after `hold_deadline_s`. If the queue is full, a new request raises NoWorkers at once, and a
        request that a worker accepted before (`is_begun`) waits.
        """
        if not is_begun and self.num_pending >= self._config.hold_requests_max:
            raise NoWorkers(
                f"no decode worker is ready, and the queue is full: {self.num_pending} requests "
                "already wait for a decode worker; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        deadline_s = self._config.hold_deadline_s
        left_s = until - time.monotonic()
        self.num_pending += 1
        try:
            with self._metrics.requests_pending.track_inprogress():
                async with asyncio.timeout(min(deadline_s, left_s)):
                    while not self._view.has_decode_worker(refused):
                        await self._view.wait_change()
        except TimeoutError:
            if left_s <= deadline_s:
                raise Overloaded(
                    "no decode worker was ready before the request's deadline; try again later",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            message = f"no decode worker was ready within {deadline_s:g} s"
            raise NoWorkers(message, retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self.num_pending -= 1
