"""Runs a prepared request on decode workers until it ends: places, submits, migrates, cancels it.

The states of a request, and what each may become, are in job.py.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from tandem.common.config.router import RouterConfig
from tandem.common.perf_model.kv_load import longest_sequence
from tandem.common.perf_model.predict import NO_PREFILL, Prefill
from tandem.errors import (
    NeverFits,
    NoWorkers,
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
_Take = Callable[[Job, Work, Placement, dict[str, int]], T]

# A request with fewer tokens to come than this ends where it is sooner than it migrates.
FINISH_TOKENS = 32
MIGRATE_AGAIN_S = 1.0
_RETRY_AFTER_S = 1.0


class Dispatcher:
    """Runs all requests of a router."""

    def __init__(
        self,
        config: RouterConfig,
        view: ClusterView,
        match: Callable[[list[bytes]], Awaitable[dict[str, int]]],
        metrics: Metrics,
        on_end: Callable[[Job], None],
        have_tenants: Callable[[], bool],
    ) -> None:
        """`match` looks up in the prefix tree; `on_end` hears of each request that ends well;
        `have_tenants` says whether requests come with tenants now."""
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

    @property
    def num_pending(self) -> int:
        """Requests that wait here because no decode worker is ready."""
        return self._pending.num_pending

    @contextmanager
    def looking_up(self, job: Job) -> Iterator[None]:
        """Looks the job up in the prefix tree beside the body, for its first placing."""
        hashes = job.hashes(self._view.compatibility())
        job.routing.lookup = lookup = asyncio.create_task(self._match(hashes), name="lookup")
        try:
            yield
        except BaseException:
            lookup.cancel()
            raise

    async def run(self, job: Job) -> AsyncGenerator[JobStep, None]:
        """Yields steps until the end; closing the iterator cancels the job where it runs.

        Raises Overloaded, QueueFull, NoWorkers, WorkerLost, or what the worker answered.
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
            self._migrations.budget.end(time.monotonic())

    async def _wait_for_parent(self, job: Job) -> None:
        if job.parent is not None:
            await job.parent.may_fork.wait()
            # Its request was taken: it is not refused for want of capacity, and does not queue.
            job.routing.homeless_since = time.monotonic()
            job.routing.is_admitted = True

    async def _submit(self, job: Job) -> Attempt:
        """Submits the job; waits for a usable decode worker, and in a migration also for room."""
        routing = job.routing
        while True:
            try:
                if (attempt := await self._try_submit(job)) is not None:
                    job.to(JobState.SUBMITTED)
                    return attempt
                is_begun = routing.homeless_since is not None
                job.to(JobState.PENDING)
                with job.progress.timeline.stage("queue"):
                    await self._pending.wait(frozenset(routing.refused), is_begun=is_begun)
                job.to(JobState.PLACING)
            except REFUSALS as error:
                if routing.homeless_since is None:
                    raise
                waited_s = time.monotonic() - routing.homeless_since
                if isinstance(error, NoWorkers) or waited_s > self._config.hold_deadline_s:
                    if job.parent is not None and not job.progress.num_lost:
                        raise
                    raise lost_for_good(job, f"no other took it; {error.message}") from error
                await asyncio.sleep(min(error.retry_after_s or math.inf, RETRY_AFTER_DEFAULT_S))
                routing.ask_all_again()

    async def place(self, job: Job) -> Placement | None:
        """Chooses workers for a job that somebody else submits, and counts it among their load
        until `note_elsewhere`. None while no decode worker is usable. Raises QueueFull, Overloaded
        and AdapterUnavailable."""
        return await self._place(job, self._count_in)

    def note_elsewhere(self, job: Job, *, has_token: bool) -> None:
        """Notes that a job that was placed has its first token, or that nobody waits for one."""
        self._note_prefilled(job, job.routing.asked[0] if has_token and job.routing.asked else "")

    async def _try_submit(self, job: Job) -> Attempt | None:
        """Submits once; None while no decode worker is usable. Raises QueueFull, Overloaded."""
        return await self._place(job, self._send)

    async def _place(self, job: Job, take: _Take[T]) -> T | None:
        """Returns what `take` makes of a placement; None while no decode worker is usable."""
        compatibility = self._view.compatibility()
        block_size = compatibility.block_size if compatibility else 16
        work = work_of(job, block_size, self._metrics.demand.output_tokens_mean)
        timeline = job.progress.timeline
        with timeline.stage("route"):
            block_hashes = job.hashes(compatibility)
            lookup = job.routing.lookup
            job.routing.lookup = None
            matches = await (lookup or self._match(block_hashes))
            waits = not job.routing.has_turn and self.admission.must_wait()
            turn = self._turn(job, work, matches)
        if waits and job.parent is None and not job.routing.num_submissions:
            job.to(JobState.WAITING)
        async with timeline.queueing(turn):
            if job.state is JobState.WAITING:
                job.to(JobState.PLACING)
            with timeline.stage("route"):
                if waits:
                    matches = await self._match(block_hashes)
                if job.parent is not None and (worker := job.parent.worker) is not None:
                    matches = {**matches, worker.worker_id: len(block_hashes)}
                placement = self._choose(job, work, matches)
                if placement is None:
                    return None
                self._admit(job, work, placement)
                return take(job, work, placement, matches)

    async def _migrate(self, job: Job, old: Attempt) -> Attempt:
        """Migrates the job while `old` still has the blocks; returns the attempt to follow now.

        `old` goes on meanwhile: if it ends there first, or nobody takes the request, what came from
        there is what counts.
        """
        job.to(JobState.MIGRATING)
        routing = job.routing
        before = routing.routed
        assert before is not None
        routing.leaves = old.worker_id
        # It may stay after all: never twice on one stream.
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
                if not self._migrations.may_ask_another(job, new.failure):
                    break
        except REFUSALS as error:
            log.debug("request %s stays: %s", job.request_id, error)
        finally:
            job.to(JobState.SUBMITTED)
            routing.leaves = ""
            routing.ask_all_again()
            routing.homeless_since = None
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
            job, "drain", f"worker {old.worker_id} leaves", off=old.worker_id
        )
        return new

    def _send(self, job: Job, work: Work, placement: Placement, matches: dict[str, int]) -> Attempt:
        """Sends the job; nothing was awaited since the worker was seen usable."""
        client = self._view.client(placement.decode.worker_id)
        assert client is not None
        leaves = self._view.roster().by_id.get(job.routing.leaves)
        message = submission(job, work, placement, matches, leaves)
        self._count_in(job, work, placement, matches)
        is_here = job.routing.asked is None
        prefill = _prefill_of(work, placement) if is_here else NO_PREFILL
        return client.submit(message, prefill=prefill)

    def _count_in(
        self, job: Job, work: Work, placement: Placement, matches: dict[str, int]
    ) -> Placement:
        """Counts a placed job among the load of its workers."""
        self._note_prefilled(job)
        job.routing.num_submissions += 1
        kind = reason_of(work, placement, matches)
        reason = f"{kind}: {placement.reason}"
        job.routing.routed = Routed(placement, matches, reason)
        self._metrics.placements.labels(reason=kind).inc()
        job.progress.timeline.submit()
        log.debug("request %s: %s", job.request_id, reason, extra={"request_id": job.request_id})
        self._view.note_share(placement.computes.worker_id, placement.prefill_s(work))
        computes_id = computing_worker(work, placement).worker_id
        if computes_id != placement.decode.worker_id:
            prefill = _prefill_of(work, placement)
            sent_at = self._view.note_prefill(computes_id, prefill)
            job.routing.asked = computes_id, prefill, sent_at
        return placement

    def _note_refusal(self, job: Job, error: TandemError) -> None:
        self._migrations.note_refusal(job, error)
        if isinstance(error, NeverFits) and (routed := job.routing.routed) is not None:
            # Nor does it fit into any pool that is no larger: those need not be asked.
            size = longest_sequence(routed.placement.decode)
            workers = self._view.snapshots()
            job.routing.refused |= {w.epoch for w in workers if 0 < longest_sequence(w) <= size}

    def _note_prefilled(self, job: Job, by: str = "") -> None:
        """Notes that the worker that was asked to prefill has done so, or need not any more."""
        if job.routing.asked is not None:
            worker_id, prefill, sent_at = job.routing.asked
            job.routing.asked = None
            self._view.note_prefilled(worker_id, prefill, sent_at, by_it=by == worker_id)

    async def _follow(self, job: Job, attempt: Attempt) -> AsyncGenerator[JobStep, None]:
        progress = job.progress
        routing = job.routing
        while True:
            token_ids: list[int] = []
            logprobs: list[LogprobEntry] = []
            finish_reason = ""
            # After what is read here, `updates` raises the failure of an attempt that has one.
            for update in await attempt.updates():
                if update.token_ids:
                    progress.take_source(update)
                    self._note_prefilled(job, update.timings.prefill_worker_id)
                    if routing.promise is not None and routing.num_submissions == 1:
                        self.admission.note_first_token(routing.promise)
                    routing.promise = None
                    token_ids.extend(update.token_ids)
                    logprobs.extend(update.logprobs)
                    progress.prompt_logprobs.extend(update.prompt_logprobs)
                    progress.embedding.extend(update.embedding)
                    if update.HasField("timings"):
                        num_output_tokens = len(progress.output_token_ids) + len(token_ids)
                        progress.timeline.take(update.timings, num_output_tokens)
                        if num_output_tokens == 1:
                            self.admission.note_wire(progress.timeline.wire_s)
                        if num_output_tokens == 2:  # its blocks are here now
                            pulled = update.timings
                            self._metrics.flows.note_pull(
                                pulled.prefill_worker_id, attempt.worker_id, pulled.blocks_pulled
                            )
                # The second token is the sign of a worker that does not say so.
                if update.is_committed or len(progress.output_token_ids) + len(token_ids) > 1:
                    job.may_fork.set()
                if update.workers_lost > attempt.num_lost:
                    progress.num_lost += update.workers_lost - attempt.num_lost
                    attempt.num_lost = update.workers_lost
                if update.finish_reason not in ("", "error"):
                    finish_reason = update.finish_reason
                    progress.timings = update.timings
            if token_ids or finish_reason:
                routing.homeless_since = None
                routing.first_token_by = math.inf
                progress.output_token_ids.extend(token_ids)
                if finish_reason:  # before the last step: who has it may not come back
                    if job.parent is None:  # the prefix tree promised nothing to the others
                        self._on_end(job)
                    job.to(JobState.ENDED)
                yield JobStep(token_ids, finish_reason, logprobs)
            if finish_reason:
                return
            if attempt.is_draining and not attempt.is_over and self._may_migrate(job):
                raise _Migrate

    def _may_migrate(self, job: Job) -> bool:
        return (
            job.request.max_tokens - len(job.progress.output_token_ids) > FINISH_TOKENS
            and time.monotonic() >= job.routing.stays_until
            and self._view.has_decode_worker()
        )

    def _choose(self, job: Job, work: Work, matches: dict[str, int]) -> Placement | None:
        """Returns None while no decode worker is usable. Raises QueueFull when all have refused, or
        what they said that cannot take it unless the job has begun: then one could, and it waits
        for such a worker."""
        routing = job.routing
        refused = frozenset(routing.refused)
        near, first = job.wanted
        roster = self._view.roster()
        placement = None
        if routing.returned_by:  # it goes elsewhere, if anybody is there
            avoided = refused | {routing.returned_by}
            placement = choose(work, roster, matches, self._rng, refused=avoided)
            routing.returned_by = ""
        placement = placement or choose(
            work, roster, matches, self._rng, refused=refused, near=near, first=first
        )
        if placement is None:
            raise_if_refused(job, work.adapter, partial(self._view.has_decode_worker, refused))
        return placement

    def _turn(
        self, job: Job, work: Work, matches: dict[str, int]
    ) -> AbstractAsyncContextManager[None]:
        """Returns the wait for a turn; only a first submission waits, a migration has already, and
        so has the parent of a job: for all of them."""
        if job.routing.num_submissions or job.parent is not None or job.routing.has_turn:
            return nullcontext()
        if self.admission.must_wait() and (placement := self._choose(job, work, matches)):
            self._admit(job, work, placement)
        depth = max(matches.values(), default=0) * work.block_size
        return self.admission.turn(
            job.request.client.tenant,
            tokens_missing=max(0, work.num_tokens - depth),
            completion_max=job.request.max_tokens * job.request.client.num_sequences,
            weight=job.request.client.limits.weight,
        )

    def _admit(self, job: Job, work: Work, placement: Placement) -> None:
        """Admits a request, once. Raises Overloaded."""
        if not job.routing.is_admitted:
            began_s = job.progress.timeline.began_s
            decision = self.admission.admit(
                work,
                placement,
                tenant=job.request.client.tenant,
                is_urgent=job.routing.is_urgent,
                waited_s=time.monotonic() - began_s,
            )
            job.routing.promise = decision.promise
            job.routing.first_token_by = began_s + decision.within_s - self.admission.wire_s
            job.routing.is_admitted = True

    async def _match(self, block_hashes: list[bytes]) -> dict[str, int]:
        if not block_hashes:
            return {}
        try:
            async with asyncio.timeout(self._config.lookup_deadline_s):
                return await self._look_up(block_hashes)
        except UNREACHABLE as error:
            self._metrics.lookups_failed.inc()
            log.debug("placing without the prefix tree: %r", error)
            return {}


def _prefill_of(work: Work, placement: Placement) -> Prefill:
    missing = placement.tokens_missing
    return Prefill.of(missing, work.num_tokens - missing)


class _Migrate(Exception):
    """Signals that the worker leaves, and the request might go on elsewhere."""


class PendingQueue:
    """The pending queue of a router."""

    def __init__(self, config: RouterConfig, view: ClusterView, metrics: Metrics) -> None:
        self._config = config
        self._view = view
        self._metrics = metrics
        self.num_pending = 0

    async def wait(self, refused: frozenset[str], *, is_begun: bool) -> None:
        """Waits for a usable decode worker. Raises NoWorkers after too long, or for too many.

        An answer that was begun is not given up for want of room here. `refused`: epochs of
        workers that need not be waited for.
        """
        if not is_begun and self.num_pending >= self._config.hold_requests_max:
            raise NoWorkers(
                f"no decode worker is ready and {self.num_pending} requests wait for one already",
                retry_after_s=_RETRY_AFTER_S,
            )
        deadline_s = self._config.hold_deadline_s
        self.num_pending += 1
        try:
            with self._metrics.requests_pending.track_inprogress():
                async with asyncio.timeout(deadline_s):
                    while not self._view.has_decode_worker(refused):
                        await self._view.wait_change()
        except TimeoutError:
            message = f"no decode worker was ready within {deadline_s:g} s"
            raise NoWorkers(message, retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self.num_pending -= 1
