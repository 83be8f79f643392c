"""Decides whether a request may continue on another worker, or fails.

This decision is needed when a worker has refused the request, was lost, or drains. The number of
migrations is limited (migration_budget.py). If the request may not continue, the error for the
client is raised.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from tandem.common.adapter import Adapter
from tandem.errors import (
    AdapterUnavailable,
    NeverFits,
    NoWorkers,
    Overloaded,
    QueueFull,
    Returned,
    TandemError,
    WorkerLeft,
    WorkerLost,
)
from tandem.router.metrics.router import Metrics
from tandem.router.request.job import Job
from tandem.router.request.migration_budget import (
    LOSSES_MAX,
    MIGRATION_REASONS,
    MigrationBudget,
    MigrationReason,
)
from tandem.router.workers.events import EventLog

log = logging.getLogger(__name__)

RETRY_AFTER_DEFAULT_S = 1.0
# Errors with which a worker refuses a request; another worker may accept it.
REFUSALS = (QueueFull, NoWorkers, NeverFits, AdapterUnavailable)


class Migrations:
    """Counts the migrations and lost workers of all requests of a router."""

    def __init__(self, metrics: Metrics, events: EventLog) -> None:
        self._metrics = metrics
        self._events = events
        for reason in MIGRATION_REASONS:
            metrics.migrations.labels(reason=reason)  # export 0 before the first migration
        self.budget = MigrationBudget()

    def note_refusal(self, job: Job, error: TandemError) -> None:
        routing = job.routing
        assert routing.routed is not None
        if isinstance(error, Returned):
            routing.num_returns += 1
            routing.returned_by = routing.routed.placement.decode.epoch
            self._metrics.refusals.labels(code=error.code).inc()
            return
        routing.refused.add(routing.routed.placement.decode.epoch)
        if isinstance(error, Overloaded):
            routing.overloaded = error
        if isinstance(error, QueueFull):
            after_s = error.retry_after_s or RETRY_AFTER_DEFAULT_S
            routing.retry_after_s = min(after_s, routing.retry_after_s or after_s)
        if isinstance(error, NeverFits | AdapterUnavailable):
            routing.cannot_take = error
        if job.progress.output_token_ids and routing.unassigned_since is None:
            routing.unassigned_since = time.monotonic()
        self._metrics.refusals.labels(code=error.code).inc()

    def note_loss(self, job: Job, error: WorkerLost) -> None:
        """Records the loss of the job's worker. Raises WorkerLost if the job may not migrate."""
        # A worker has accepted the request once, so the next worker must not refuse it as too late.
        job.routing.first_token_by = math.inf
        is_crash = not isinstance(error, WorkerLeft)
        if is_crash and (why_not := self._count_loss(job)):
            raise lost_for_good(
                job, f"{error.message}; the request is not moved again: {why_not}"
            ) from error
        job.routing.unassigned_since = time.monotonic()
        off = job.worker.worker_id if job.worker is not None else ""
        self.note_migration(job, "crash" if is_crash else "drain", error.message, off=off)

    def note_migration(self, job: Job, reason: MigrationReason, why: str, *, off: str) -> None:
        """Records that the request migrates, or has migrated, from the worker `off`."""
        job.progress.num_migrations += 1
        self._metrics.flows.note_move(off, partial(_worker_of, job))
        self._metrics.migrations.labels(reason=reason).inc()
        if (routed := job.routing.routed) is not None:
            how = "was lost" if reason == "crash" else "drains"
            text = f"moved to another worker because this worker {how}"
            self._events.count("migrated", off or routed.placement.decode.worker_id, text)
        level = logging.WARNING if reason == "crash" else logging.INFO
        num_output_tokens = len(job.progress.output_token_ids)
        log.log(
            level,
            "request %s moves to another worker after %d generated tokens: %s",
            job.request_id,
            num_output_tokens,
            why,
            extra={"request_id": job.request_id},
        )

    def may_try_another(self, job: Job, failure: TandemError) -> bool:
        """Returns whether to try another worker after a failed attempt to migrate."""
        if isinstance(failure, REFUSALS):
            self.note_refusal(job, failure)
            return True
        if isinstance(failure, WorkerLeft):
            return True
        return isinstance(failure, WorkerLost) and not self._count_loss(job)

    def _count_loss(self, job: Job) -> str:
        """Counts a lost worker. Returns why the request may not migrate, or "" if it may."""
        progress = job.progress
        # `num_lost` may have reached the maximum already, because it also counts lost prefill
        # workers, which the decode worker has reported (`workers_lost`).
        if progress.num_lost < LOSSES_MAX:
            progress.num_lost += 1
        if progress.num_lost == LOSSES_MAX:
            return f"it may lose at most {LOSSES_MAX} workers"
        if not self.budget.take(time.monotonic()):
            return "too many requests have moved in the last minute"
        return ""


def _worker_of(job: Job) -> str:
    return job.worker.worker_id if job.worker is not None else ""


def lost_for_good(job: Job, why: str) -> WorkerLost:
    count = job.progress.num_lost
    workers = "1 worker was" if count == 1 else f"{count} workers were"
    return WorkerLost(
        f"{workers} lost while this request ran, after {len(job.progress.output_token_ids)} "
        f"generated tokens: {why}",
        retry_after_s=RETRY_AFTER_DEFAULT_S,
    )


def raise_if_refused(job: Job, adapter: Adapter | None, can_decode: Callable[[], bool]) -> None:
    """Raises the error for the client if no decode worker can be chosen because of refusals.

    Returns normally if the job may wait for a usable decode worker. A job that a worker accepted
    before always waits if workers refuse it with NeverFits or AdapterUnavailable, because a worker
    that can run the job may come back. `can_decode` returns whether there is a usable decode worker
    that has not refused the job.
    """
    routing = job.routing
    if routing.overloaded is not None:
        message = f"all workers are busy: {routing.overloaded.message}"
        raise Overloaded(message, retry_after_s=routing.retry_after_s)
    if routing.retry_after_s is not None:
        raise QueueFull(
            "the queues of all decode workers are full; try again later, or let the operator raise "
            "--queue-max",
            retry_after_s=routing.retry_after_s,
        )
    if routing.unassigned_since is not None:
        return
    if routing.cannot_take is not None:
        raise routing.cannot_take
    if adapter is not None and can_decode():
        raise AdapterUnavailable(
            f"no decode worker can load the adapter {adapter.name!r} now; try again later",
            retry_after_s=RETRY_AFTER_DEFAULT_S,
        )
