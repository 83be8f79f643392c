"""What becomes of a request whose worker refused it, was lost under it, or leaves.

Raises what its client gets when it may not move any more; the bounds are in move_budget.py.
"""

from __future__ import annotations

import logging
import time

from tandem.errors import NeverFits, NoWorkers, QueueFull, TandemError, WorkerLeft, WorkerLost
from tandem.router.metrics.router import Metrics
from tandem.router.request.job import Job
from tandem.router.request.move_budget import LOSSES_MAX, MOVE_REASONS, MoveBudget, MoveReason

log = logging.getLogger(__name__)

RETRY_AFTER_DEFAULT_S = 1.0
# What a worker answers that does not take the request: another one may.
REFUSALS = (QueueFull, NoWorkers, NeverFits)


class Moves:
    """Of all requests of a router."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        for reason in MOVE_REASONS:
            metrics.moves.labels(reason=reason)  # 0 before the first one
        self.budget = MoveBudget()

    def note_refusal(self, job: Job, error: TandemError) -> None:
        assert job.placement is not None
        job.refused.add(job.placement.decode.epoch)
        if isinstance(error, QueueFull):
            after_s = error.retry_after_s or RETRY_AFTER_DEFAULT_S
            job.retry_after_s = min(after_s, job.retry_after_s or after_s)
        if isinstance(error, NeverFits):
            job.never_fits = error
        if job.made and job.homeless_since is None:
            job.homeless_since = time.monotonic()
        self._metrics.refusals.labels(code=error.code).inc()

    def note_loss(self, job: Job, error: WorkerLost) -> None:
        """Lets the request move, or raises WorkerLost."""
        is_crash = not isinstance(error, WorkerLeft)
        if is_crash and (why_not := self._count_loss(job)):
            raise lost_for_good(job, f"{error.message}; {why_not}") from error
        job.homeless_since = time.monotonic()
        self.note_move(job, "crash" if is_crash else "drain", error.message)

    def note_move(self, job: Job, reason: MoveReason, why: str) -> None:
        job.num_moves += 1
        self._metrics.moves.labels(reason=reason).inc()
        level = logging.WARNING if reason == "crash" else logging.INFO
        request_id = job.request.request_id
        log.log(
            level,
            "request %s moves with %d tokens: %s",
            request_id,
            len(job.made),
            why,
            extra={"request_id": request_id},
        )

    def may_ask_another(self, job: Job, failure: TandemError) -> bool:
        """After a worker did not take a request that may as well stay where it is."""
        if isinstance(failure, REFUSALS):
            self.note_refusal(job, failure)
            return True
        if isinstance(failure, WorkerLeft):
            return True
        return isinstance(failure, WorkerLost) and not self._count_loss(job)

    def _count_loss(self, job: Job) -> str:
        """Why it may not move again; empty: it may."""
        if job.num_lost < LOSSES_MAX:  # else its worker told of the last one already
            job.num_lost += 1
        if job.num_lost == LOSSES_MAX:
            return "no request may lose more"
        if not self.budget.take(time.monotonic()):
            return "and too many requests have moved in the last minute"
        return ""


def lost_for_good(job: Job, why: str) -> WorkerLost:
    count = job.num_lost
    workers = "1 worker was" if count == 1 else f"{count} workers were"
    return WorkerLost(
        f"{workers} lost under this request after {len(job.made)} tokens: {why}",
        retry_after_s=RETRY_AFTER_DEFAULT_S,
    )
