"""A prepared request, run on decode workers until it ends: placed, submitted, moved, cancelled.

    placing --no usable decode worker--> holding (bounded) --a worker came--> placing
            --its first token would come too late--> refused, before anything is sent
            --tenants take turns--> waiting (line.py) --> placing
    placing --> submitted --queue full, or pool too small--> placing, without that worker
                          --worker lost--> placing, with the tokens made so far (at most twice)
                          --worker leaves--> handing over --first token there--> submitted
                                                  `--nobody takes it--> submitted, as it was
                          --tokens--> ... --> ended | failed
    any --closed by the caller--> cancelled at the worker

A request that moves has been taken already: where all are full or none is there it waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from tandem.config import RouterConfig
from tandem.errors import NeverFits, NoWorkers, QueueFull, TandemError, WorkerLost
from tandem.router.admission.gate import Gate
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work, choose
from tandem.router.placement.costs import computing_s
from tandem.router.placement.reasons import reason_of
from tandem.router.request.holding import Holding
from tandem.router.request.job import Job, Step, submission
from tandem.router.request.move_budget import LOSSES_MAX
from tandem.router.request.moves import REFUSALS, RETRY_AFTER_DEFAULT_S, Moves, lost_for_good
from tandem.router.workers.attempt import Attempt
from tandem.router.workers.cluster_view import ClusterView
from tandem.store.client import UNREACHABLE

__all__ = ["Dispatcher", "Job", "PrefixLookup", "Step"]

log = logging.getLogger(__name__)

# A request with fewer tokens to come than this ends where it is sooner than it moves.
FINISH_TOKENS = 32
HAND_OVER_AGAIN_S = 1.0


class PrefixLookup(Protocol):
    async def match(self, block_hashes: list[bytes]) -> dict[str, int]: ...


class Dispatcher:
    """Shared by all requests of a router."""

    def __init__(
        self, config: RouterConfig, view: ClusterView, lookup: PrefixLookup, metrics: Metrics
    ) -> None:
        self._config = config
        self._view = view
        self._lookup = lookup
        self._metrics = metrics
        self._rng = random.Random()
        self.on_end: Callable[[Job], None] = lambda job: None  # of each request that ended well
        self._holding = Holding(config, view, metrics)
        self._gate = Gate(config, view, metrics)
        self._moves = Moves(metrics)

    @property
    def num_holding(self) -> int:
        """Requests that wait here because no decode worker is ready."""
        return self._holding.num_holding

    async def run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Steps until the end; closing the iterator cancels the job where it runs.

        Raises Overloaded, QueueFull, NoWorkers, WorkerLost, or what the worker answered.
        """
        self._moves.budget.begin()
        try:
            attempt = await self._submit(job)
            try:
                while True:
                    try:
                        async for step in self._follow(job, attempt):
                            yield step
                        return
                    except _HandOver:
                        attempt = await self._hand_over(job, attempt)
                        continue
                    except REFUSALS as error:
                        self._note_refusal(job, error)
                    except WorkerLost as error:
                        self._moves.note_loss(job, error)
                    attempt.close()
                    attempt = await self._submit(job)
            finally:
                attempt.close()
        finally:
            self._note_prefilled(job)
            self._moves.budget.end(time.monotonic())

    async def _submit(self, job: Job) -> Attempt:
        """Waits while no decode worker is usable, and one that moves while all are full."""
        while True:
            try:
                if (attempt := await self._try_submit(job)) is not None:
                    return attempt
                is_begun = job.homeless_since is not None
                with job.timeline.stage("queue"):
                    await self._holding.wait(frozenset(job.refused), is_begun=is_begun)
            except REFUSALS as error:
                if job.homeless_since is None:
                    raise
                waited_s = time.monotonic() - job.homeless_since
                if isinstance(error, NoWorkers) or waited_s > self._config.hold_deadline_s:
                    raise lost_for_good(job, f"no other took it; {error.message}") from error
                await asyncio.sleep(min(error.retry_after_s or math.inf, RETRY_AFTER_DEFAULT_S))
                job.refused.clear()
                job.retry_after_s = None

    async def _try_submit(self, job: Job) -> Attempt | None:
        """None while no decode worker is usable. Raises QueueFull, Overloaded."""
        work = self._work(job)
        timeline = job.timeline
        with timeline.stage("route"):
            block_hashes = job.hashes(self._view.contract())
            matches = await self._match(block_hashes)
            waits = self._gate.must_wait()
            turn = self._turn(job, work, matches)
        async with timeline.queueing(turn):
            with timeline.stage("route"):
                if waits:
                    matches = await self._match(block_hashes)
                placement = self._choose(job, work, matches)
                if placement is None:
                    return None
                self._admit(job, work, placement)
                return self._send(job, work, placement, matches)

    async def _hand_over(self, job: Job, old: Attempt) -> Attempt:
        """Has another worker go on, while `old` still has the blocks; whom to follow from now on.

        `old` goes on meanwhile: if it ends there first, or nobody takes the request, what came from
        there is what counts.
        """
        before = job.placement, job.matches, job.reason
        job.leaves = old.worker_id
        if job.placement is not None:  # it may stay after all: never twice on one stream
            job.refused.add(job.placement.decode.epoch)
        new: Attempt | None = None
        is_handed_over = False
        try:
            while (new := await self._try_submit(job)) is not None:
                await new.news_or_end_of(old)
                is_handed_over = not old.is_finished and (new.failure is None or old.is_over)
                if is_handed_over or old.is_finished or new.failure is None:
                    break
                new.close()
                if not self._moves.may_ask_another(job, new.failure):
                    break
        except REFUSALS as error:
            log.debug("request %s stays: %s", job.request.request_id, error)
        finally:
            job.leaves = ""
            job.refused.clear()
            job.homeless_since, job.retry_after_s = None, None
            if not is_handed_over:
                job.placement, job.matches, job.reason = before
                may_lose_more = job.num_lost < LOSSES_MAX
                again_s = HAND_OVER_AGAIN_S if may_lose_more else math.inf
                job.stays_until = time.monotonic() + again_s
                if new is not None:
                    new.close()
        if not is_handed_over or new is None:
            return old
        old.close()
        self._moves.note_move(job, "drain", f"worker {old.worker_id} leaves")
        return new

    def _send(self, job: Job, work: Work, placement: Placement, matches: dict[str, int]) -> Attempt:
        """Nothing was awaited since the worker was seen usable."""
        self._note_prefilled(job)
        client = self._view.client(placement.decode.worker_id)
        assert client is not None
        leaves = self._view.roster().by_id.get(job.leaves)
        message = submission(job, placement, matches, leaves)
        job.placement, job.matches = placement, matches
        job.num_submissions += 1
        kind = reason_of(work, placement, matches)
        job.reason = f"{kind}: {placement.reason}"
        self._metrics.placements.labels(reason=kind).inc()
        about = {"request_id": job.request.request_id}
        log.debug("request %s: %s", job.request.request_id, job.reason, extra=about)
        computes = (*placement.prefill_candidates, placement.decode)[0]
        prefill_s = computing_s(work, computes, placement.tokens_missing)
        self._view.note_share(computes.worker_id, prefill_s)
        if not placement.prefill_candidates:
            return client.submit(message, tokens_to_prefill=placement.tokens_missing)
        first = placement.prefill_candidates[0]
        missing = placement.tokens_missing
        sent_at = self._view.note_prefill(first.worker_id, missing)
        job.asked = first.worker_id, missing, sent_at
        return client.submit(message, tokens_to_prefill=0)

    def _note_refusal(self, job: Job, error: TandemError) -> None:
        self._moves.note_refusal(job, error)
        if isinstance(error, NeverFits) and job.placement is not None:
            # Nor does it fit into any pool that is no larger: those need not be asked.
            size, workers = job.placement.decode.blocks_total, self._view.snapshots()
            job.refused |= {w.epoch for w in workers if 0 < w.blocks_total <= size}

    def _note_prefilled(self, job: Job, by: str = "") -> None:
        """Whoever was asked to prefill it has done so, or need not any more."""
        if job.asked is not None:
            worker_id, num_tokens, sent_at = job.asked
            job.asked = None
            self._view.note_prefilled(worker_id, num_tokens, sent_at, by_it=by == worker_id)

    async def _follow(self, job: Job, attempt: Attempt) -> AsyncGenerator[Step, None]:
        while True:
            token_ids: list[int] = []
            finish_reason = ""
            failure: TandemError | None = None
            for update in await attempt.updates():
                if update.token_ids and not (job.made or token_ids):
                    job.cached_tokens = update.cached_tokens
                if update.token_ids:
                    self._note_prefilled(job, update.timings.prefill_worker_id)
                    if job.promise is not None and job.num_submissions == 1:
                        self._gate.note_first_token(job.promise)
                    job.promise = None
                token_ids.extend(update.token_ids)
                if update.token_ids and update.HasField("timings"):
                    job.timeline.take(update.timings, len(job.made) + len(token_ids))
                if update.workers_lost > attempt.num_lost:
                    job.num_lost += update.workers_lost - attempt.num_lost
                    attempt.num_lost = update.workers_lost
                if update.finish_reason == "error":
                    failure = attempt.failure
                elif update.finish_reason:
                    finish_reason = update.finish_reason
                    job.timings = update.timings
            if token_ids or finish_reason:
                job.homeless_since = None
                job.made.extend(token_ids)
                if finish_reason:  # before the last step: who has it may not come back
                    self.on_end(job)
                yield Step(token_ids, finish_reason)
            if failure is not None:
                raise failure
            if finish_reason:
                return
            if attempt.is_draining and not attempt.is_over and self._may_hand_over(job):
                raise _HandOver

    def _may_hand_over(self, job: Job) -> bool:
        return (
            job.max_tokens - len(job.made) > FINISH_TOKENS
            and time.monotonic() >= job.stays_until
            and self._view.has_decode_worker()
        )

    def _choose(self, job: Job, work: Work, matches: dict[str, int]) -> Placement | None:
        """None while no decode worker is usable. Raises QueueFull when all have refused, or
        NeverFits: not for what was begun, which fitted somewhere and waits for such a worker."""
        refused = frozenset(job.refused)
        placement = choose(work, self._view.roster(), matches, self._rng, refused=refused)
        if placement is None and job.retry_after_s is not None:
            raise QueueFull(
                "the queues of all decode workers are full; try again later",
                retry_after_s=job.retry_after_s,
            )
        if placement is None and job.never_fits is not None and job.homeless_since is None:
            raise job.never_fits
        return placement

    def _turn(
        self, job: Job, work: Work, matches: dict[str, int]
    ) -> AbstractAsyncContextManager[None]:
        """Only its first submission waits for a turn: who moves waited already."""
        if job.num_submissions:
            return nullcontext()
        if self._gate.must_wait() and (placement := self._choose(job, work, matches)):
            self._admit(job, work, placement)
        depth = max(matches.values(), default=0) * work.block_size
        return self._gate.turn(
            job.request.tenant,
            tokens_missing=max(0, work.num_tokens - depth),
            completion_max=job.max_tokens,
        )

    def _admit(self, job: Job, work: Work, placement: Placement) -> None:
        """Once a request. Raises Overloaded."""
        if not job.is_admitted:
            job.promise = self._gate.admit(work, placement, tenant=job.request.tenant)
            job.is_admitted = True

    def _work(self, job: Job) -> Work:
        contract = self._view.contract()
        return Work(job.num_tokens, contract.block_size if contract else 16)

    async def _match(self, block_hashes: list[bytes]) -> dict[str, int]:
        if not block_hashes:
            return {}
        try:
            async with asyncio.timeout(self._config.lookup_deadline_s):
                return await self._lookup.match(block_hashes)
        except UNREACHABLE as error:
            self._metrics.lookups_failed.inc()
            log.debug("placing without the prefix tree: %r", error)
            return {}


class _HandOver(Exception):
    """The worker leaves, and the request might go on elsewhere."""
