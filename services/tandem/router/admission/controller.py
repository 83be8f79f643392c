"""The admission controller: refuses requests early and makes tenants take turns.

The refusals and the turns depend on the workers' load reports. While Redis is lost, prefill workers
cannot report, so every request is submitted at once, and only the workers' own limits apply.
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from tandem.common.config.router import RouterConfig
from tandem.errors import Overloaded
from tandem.router.admission.admit import AdmissionDecision, admit
from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.capacity import QUEUED_MAX_S, has_capacity, work_s
from tandem.router.admission.predict import OWN_TIMES, TtftLimit
from tandem.router.admission.tenant_queues import TenantQueues
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work
from tandem.router.workers.cluster_view import ClusterView

_WIRE_WEIGHT = 0.05  # weight of the newest sample in `wire_s` after the first 20 samples

log = logging.getLogger(__name__)


class AdmissionController:
    """Admits and refuses requests. Each router has one."""

    def __init__(
        self,
        config: RouterConfig,
        view: ClusterView,
        metrics: Metrics,
        *,
        have_tenants: Callable[[], bool],
    ) -> None:
        """`have_tenants` returns whether requests have tenants. Only then do tenants take turns."""
        self._view = view
        self._have_tenants = have_tenants
        self._metrics = metrics
        self._calibration = Calibration()
        # Mean seconds that a first token takes from the worker's engine to this router's stream.
        self.wire_s = 0.0
        self._num_wires = 0
        self._limit = TtftLimit(config.ttft_limit_s, config.ttft_limit_token_s, OWN_TIMES)
        waiting_max = config.hold_requests_max
        self._tenant_queues = TenantQueues(self.has_capacity, waiting_max=waiting_max)
        view.listen(self._tenant_queues.release_next)

    def must_wait(self) -> bool:
        """Returns whether a request that arrives now would wait for its tenant's turn."""
        return self._have_tenants() and self._tenant_queues.must_wait()

    def admit(
        self,
        work: Work,
        placement: Placement,
        *,
        tenant: str,
        is_urgent: bool = False,
        waited_s: float = 0.0,
    ) -> AdmissionDecision:
        """Admits a request that arrived `waited_s` ago. Called once per request.

        Raises Overloaded if the first token would be too late, unless the request is urgent.
        """
        demand = self._metrics.demand
        demand.new_request(placement.prefill_s(work))
        if is_urgent or not self._limit.base_s or self._view.redis_state != "ok":
            return AdmissionDecision(0.0)
        decision = admit(
            work,
            placement,
            self._limit,
            self._calibration,
            ahead_s=waited_s + self._ahead_s(tenant),
            completion_tokens=demand.output_tokens_mean,
            now=time.monotonic(),
        )
        if decision.is_admitted:
            return decision
        late_s = decision.late_s
        limit_s = self._limit.seconds(work.num_tokens)
        log.info(
            "refused a request, because its first token would come %d s after the limit of "
            "--ttft-limit. Its best placement was: %s",
            math.ceil(late_s),
            placement.summary,
        )
        raise Overloaded(
            "all workers are busy: the first token would take longer than the limit of "
            f"{limit_s:g} s; try again in {math.ceil(late_s)} s",
            retry_after_s=late_s,
        )

    def note_wire(self, seconds: float) -> None:
        """Records the delay of a first token on its way from the worker to this router.

        The worker cannot measure this delay.
        """
        self._num_wires += 1
        self.wire_s += max(1 / self._num_wires, _WIRE_WEIGHT) * (seconds - self.wire_s)

    def note_first_token(self, promise: Promise) -> None:
        """Records the first token of a request that was admitted with this promise."""
        self._calibration = self._calibration.kept(promise, time.monotonic())

    @asynccontextmanager
    async def turn(
        self, tenant: str, *, tokens_missing: int, completion_max: int, weight: float
    ) -> AsyncIterator[None]:
        """Waits for the tenant's turn if tenants take turns.

        The `with` block must submit the request.
        """
        if not self._have_tenants():
            yield
            return
        with ExitStack() as pending:
            pending.enter_context(self._metrics.requests_pending.track_inprogress())
            cost = work_s(self._view.snapshots(), tokens_missing, completion_max)
            async with self._tenant_queues.turn(tenant, cost, weight=weight):
                pending.close()
                yield

    def has_capacity(self) -> bool:
        """Returns whether the workers would begin one more request soon."""
        if self._view.redis_state != "ok":
            return True
        return has_capacity(self._view.snapshots(), queued_max_s=self._queued_max_s())

    def _queued_max_s(self) -> float:
        """Returns the limit of a prefill queue in seconds: a worker with a longer queue has no
        capacity.

        The limit is at most half of the queue length at which requests are refused. So, as the
        load grows, requests begin to wait in the tenants' queues before any request is refused.
        """
        if not self._limit.base_s:
            return QUEUED_MAX_S
        refused_s = self._calibration.margin * self._limit.base_s / self._calibration.factor
        return min(QUEUED_MAX_S, refused_s / 2)

    def _ahead_s(self, tenant: str) -> float:
        if not self._have_tenants():
            return 0.0
        num_usable = sum(w.usable for w in self._view.snapshots())
        return self._tenant_queues.cost_ahead(tenant) / max(1, num_usable)
