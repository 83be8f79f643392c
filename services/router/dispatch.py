"""A prepared request, run on decode workers until it ends: placed, submitted, moved, cancelled.

    placing --no usable decode worker--> holding (bounded) --a worker came--> placing
            --its first token would come too late--> refused, before anything is sent
            --tenants take turns--> waiting (line.py) --> placing
    placing --> submitted --queue full--> placing, without that worker
                          --worker lost, no token yet--> placing (at most MOVES_MAX times)
                          --tokens--> ... --> ended | failed
    any --closed by the caller--> cancelled at the worker

Knows token ids, not text. Sampling is seeded by position, so a moved request makes the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from services.config import RouterConfig
from services.errors import NoWorkers, QueueFull, TandemError, WorkerLost, from_code
from services.redis_client import UNREACHABLE
from services.router.cluster_view import ClusterView
from services.router.costs import computing_s
from services.router.gate import Gate
from services.router.metrics import Metrics
from services.router.placement import Placement, Work, choose
from services.router.reasons import reason_of
from services.router.request import GenerationRequest
from services.router.timeline import Timeline
from services.router.worker_client import Attempt
from services.rpc.tandem.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

MOVES_MAX = 2
RETRY_AFTER_DEFAULT_S = 1.0
# What a worker answers that does not take the request: another one may.
_REFUSALS = (QueueFull, NoWorkers)


class PrefixLookup(Protocol):
    async def match(self, block_hashes: list[bytes]) -> dict[str, int]: ...


@dataclass(slots=True)
class Job:
    """One request on its way, and what became of it so far."""

    request: GenerationRequest
    seed: int
    token_ids: list[int]
    block_hashes: list[bytes]
    max_tokens: int
    stop_token_ids: list[int]
    cache_salt: bytes = b""
    made: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    is_admitted: bool = False
    num_submissions: int = 0
    num_moves: int = 0
    refused: set[str] = field(default_factory=set)  # epochs of workers that did not take it
    retry_after_s: float | None = None  # the shortest that a full worker named
    placement: Placement | None = None
    matches: dict[str, int] = field(default_factory=dict)  # that it was placed by
    reason: str = ""  # for the placement, in one line
    timings: pb.SequenceTimings | None = None
    timeline: Timeline = field(default_factory=Timeline)


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of a job; `finish_reason` ("stop" or "length") only in the last step."""

    token_ids: list[int]
    finish_reason: str = ""


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
        self._num_holding = 0
        self._gate = Gate(config, view, metrics)

    @property
    def num_holding(self) -> int:
        """Requests that wait here because no decode worker is ready."""
        return self._num_holding

    async def run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Steps until the end; closing the iterator cancels the job where it runs.

        Raises Overloaded, QueueFull, NoWorkers, WorkerLost, or what the worker answered.
        """
        while True:
            attempt = await self._submit(job)
            try:
                async for step in self._follow(job, attempt):
                    yield step
                return
            except _REFUSALS as error:
                if job.made:
                    raise
                self._note_refusal(job, error)
            except WorkerLost as error:
                self._note_loss(job, error)
            finally:
                attempt.close()

    async def _submit(self, job: Job) -> Attempt:
        work = self._work(job)
        timeline = job.timeline
        while True:
            with timeline.stage("route"):
                matches = await self._match(job.block_hashes)
                waits = self._gate.must_wait()
                turn = self._turn(job, work, matches)
            async with timeline.queueing(turn):
                with timeline.stage("route"):
                    if waits:
                        matches = await self._match(job.block_hashes)
                    placement = self._choose(job, work, matches)
                    if placement is not None:
                        self._admit(job, work, placement)
                        return self._send(job, work, placement, matches)
            with timeline.stage("queue"):
                await self._hold(frozenset(job.refused))

    def _send(self, job: Job, work: Work, placement: Placement, matches: dict[str, int]) -> Attempt:
        """Nothing was awaited since the worker was seen usable."""
        client = self._view.client(placement.decode.worker_id)
        assert client is not None
        job.placement, job.matches = placement, matches
        message = _submission(job, placement, matches)
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
        self._view.note_prefill(first.worker_id, placement.tokens_missing)
        return client.submit(message, tokens_to_prefill=0)

    async def _follow(self, job: Job, attempt: Attempt) -> AsyncGenerator[Step, None]:
        while True:
            token_ids: list[int] = []
            finish_reason = ""
            failure: TandemError | None = None
            for update in await attempt.updates():
                token_ids.extend(update.token_ids)
                job.cached_tokens = job.cached_tokens or update.cached_tokens
                if update.token_ids and update.HasField("timings"):
                    job.timeline.take(update.timings, len(job.made) + len(token_ids))
                if update.finish_reason == "error":
                    failure = from_code(
                        update.error.code,
                        update.error.message,
                        retry_after_s=update.error.retry_after_s or None,
                    )
                elif update.finish_reason:
                    finish_reason = update.finish_reason
                    job.timings = update.timings
            if token_ids or finish_reason:
                job.made.extend(token_ids)
                if finish_reason:  # before the last step: who has it may not come back
                    self.on_end(job)
                yield Step(token_ids, finish_reason)
            if failure is not None:
                raise failure
            if finish_reason:
                return

    def _choose(self, job: Job, work: Work, matches: dict[str, int]) -> Placement | None:
        """None while no decode worker is usable. Raises QueueFull when all have refused."""
        refused = frozenset(job.refused)
        placement = choose(work, self._view.roster(), matches, self._rng, refused=refused)
        if placement is None and job.retry_after_s is not None:
            raise QueueFull(
                "the queues of all decode workers are full; try again later",
                retry_after_s=job.retry_after_s,
            )
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
            self._gate.admit(work, placement, tenant=job.request.tenant)
            job.is_admitted = True

    def _work(self, job: Job) -> Work:
        contract = self._view.contract()
        return Work(len(job.token_ids), contract.block_size if contract else 16)

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

    async def _hold(self, refused: frozenset[str]) -> None:
        """Waits for a usable decode worker. Raises NoWorkers after too long, or for too many."""
        if self._num_holding >= self._config.hold_requests_max:
            raise NoWorkers(
                f"no decode worker is ready and {self._num_holding} requests wait for one already",
                retry_after_s=RETRY_AFTER_DEFAULT_S,
            )
        deadline_s = self._config.hold_deadline_s
        self._num_holding += 1
        self._metrics.requests_holding.inc()
        try:
            async with asyncio.timeout(deadline_s):
                while not self._view.has_decode_worker(refused):
                    await self._view.wait_change()
        except TimeoutError:
            raise NoWorkers(
                f"no decode worker was ready within {deadline_s:g} s",
                retry_after_s=RETRY_AFTER_DEFAULT_S,
            ) from None
        finally:
            self._num_holding -= 1
            self._metrics.requests_holding.dec()

    def _note_refusal(self, job: Job, error: TandemError) -> None:
        assert job.placement is not None
        job.refused.add(job.placement.decode.epoch)
        if isinstance(error, QueueFull):
            after_s = error.retry_after_s or RETRY_AFTER_DEFAULT_S
            job.retry_after_s = min(after_s, job.retry_after_s or after_s)
        self._metrics.refusals.labels(code=error.code).inc()

    def _note_loss(self, job: Job, error: WorkerLost) -> None:
        """Lets the request move, or raises what its client gets."""
        if job.made:
            raise WorkerLost(f"{error.message} after {len(job.made)} tokens") from error
        if job.num_moves >= MOVES_MAX:
            raise WorkerLost(
                f"{error.message}; the request was moved {MOVES_MAX} times already",
                retry_after_s=RETRY_AFTER_DEFAULT_S,
            ) from error
        job.num_moves += 1
        self._metrics.moves.inc()
        request_id = job.request.request_id
        about = {"request_id": request_id}
        log.warning("request %s moves: %s", request_id, error.message, extra=about)


def _submission(job: Job, placement: Placement, matches: Mapping[str, int]) -> pb.SubmitSequence:
    sampling = job.request.sampling
    trace = job.timeline.span.headers
    return pb.SubmitSequence(
        request_id=job.request.request_id,
        attempt=job.num_submissions,
        input=pb.SequenceInput(
            token_ids=job.token_ids + job.made,
            num_prompt_tokens=len(job.token_ids),
            sampling=pb.Sampling(
                temperature=sampling.effective_temperature,
                top_k=max(0, sampling.top_k),
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=job.seed,
            ),
            max_tokens=job.max_tokens,
            stop_token_ids=job.stop_token_ids,
            cache_salt=job.cache_salt,
        ),
        trace=pb.TraceContext(**trace) if trace else None,
        prefill_candidates=[
            pb.PrefillCandidate(
                worker_id=w.worker_id,
                epoch=w.epoch,
                address=w.address,
                cached_blocks=matches.get(w.worker_id, 0),
            )
            for w in placement.prefill_candidates
        ],
        prefix_holders=[
            pb.PrefixHolder(
                worker_id=w.worker_id,
                epoch=w.epoch,
                address=w.address,
                num_blocks=matches[w.worker_id],
            )
            for w in placement.prefix_holders
        ],
    )
