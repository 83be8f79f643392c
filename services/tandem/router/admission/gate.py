"""Whether a request is taken, and when it goes to the workers: early refusal, and turns of tenants.

Both weigh what workers told of their load. While Redis is lost prefill workers cannot tell: then
everybody goes at once, as the workers' own bounds allow.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.config import RouterConfig
from tandem.errors import Overloaded
from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.line import Line
from tandem.router.admission.predict import (
    TtftLimit,
    allowed_s,
    expected_ttft_s,
)
from tandem.router.admission.room import QUEUED_MAX_S, has_room, work_s
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work
from tandem.router.placement.costs import computing_s
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

OWN_TIMES = 2.0  # a prompt may wait as long as it takes itself, whatever the limit is


class Gate:
    """One a router."""

    def __init__(self, config: RouterConfig, view: ClusterView, metrics: Metrics) -> None:
        self._view = view
        self._metrics = metrics
        self._calibration = Calibration()
        self._limit = TtftLimit(config.ttft_limit_s, config.ttft_limit_token_s, OWN_TIMES)
        self._line: Line | None = None
        if config.trust_tenant_header:
            self._line = Line(self._has_room, waiting_max=config.hold_requests_max)
            view.on_news = self._line.let_go

    def must_wait(self) -> bool:
        """Whether a request that came now would wait for its tenant's turn."""
        return self._line is not None and self._line.must_wait()

    def admit(self, work: Work, placement: Placement, *, tenant: str) -> Promise | None:
        """Once a request. Raises Overloaded when its first token would come too late."""
        computes = (*placement.prefill_candidates, placement.decode)[0]
        self._metrics.demand.asked(computing_s(work, computes, placement.tokens_missing))
        if not self._limit.base_s or self._view.redis_state != "ok":
            return None
        made = self._metrics.demand.output_tokens_mean
        predicted_s = self._ahead_s(tenant)
        predicted_s += expected_ttft_s(work, placement, completion_tokens=made)
        slower = self._calibration.factor
        margin = self._calibration.margin
        most_s = allowed_s(work, placement, self._limit, slower=slower, margin=margin)
        late_s = slower * predicted_s - most_s
        limit_s = self._limit.seconds(work.num_tokens)
        if most_s == math.inf:  # nobody measured anything: nothing to learn from
            return None
        if late_s <= 0:
            return self._calibration.promise(predicted_s, limit_s, time.monotonic())
        log.info("refused: %d s late by %s", math.ceil(late_s), placement.reason)
        raise Overloaded(
            f"all workers are busy: the first token is not to be expected within {limit_s:g} s; "
            f"try again in {math.ceil(late_s)} s",
            retry_after_s=late_s,
        )

    def note_first_token(self, promise: Promise) -> None:
        """Of a request that was admitted with it."""
        self._calibration.kept(promise, time.monotonic())

    @asynccontextmanager
    async def turn(
        self, tenant: str, *, tokens_missing: int, completion_max: int
    ) -> AsyncIterator[None]:
        """Waits for the tenant's turn, if tenants take turns; inside, it is to be submitted."""
        if self._line is None:
            yield
            return
        workers = self._view.roster().by_id.values()
        self._metrics.requests_holding.inc()
        is_holding = True
        try:
            cost = work_s(workers, tokens_missing, completion_max)
            async with self._line.turn(tenant, cost):
                self._metrics.requests_holding.dec()
                is_holding = False
                yield
        finally:
            if is_holding:
                self._metrics.requests_holding.dec()

    def _has_room(self) -> bool:
        workers = self._view.roster().by_id.values()
        told = self._view.redis_state == "ok"
        return not told or has_room(workers, queued_max_s=self._queued_max_s())

    def _queued_max_s(self) -> float:
        """Shorter than what is refused: else nobody would ever wait for a turn."""
        if not self._limit.base_s:
            return QUEUED_MAX_S
        refused_s = self._calibration.margin * self._limit.base_s / self._calibration.factor
        return min(QUEUED_MAX_S, refused_s / 2)

    def _ahead_s(self, tenant: str) -> float:
        if self._line is None:
            return 0.0
        num_usable = sum(w.usable for w in self._view.roster().by_id.values())
        return self._line.cost_ahead(tenant) / max(1, num_usable)
