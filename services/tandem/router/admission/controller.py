"""The admission controller: refuses requests early and makes requests take turns.

The refusals and the turns depend on the workers' load reports. While Redis is lost, prefill workers
cannot report, so every request is submitted at once, and only the workers' own limits apply.
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

from tandem.common.config.router import RouterConfig
from tandem.errors import Overloaded
from tandem.router.admission.admit import AdmissionDecision, admit
from tandem.router.admission.calibration import Calibration, Promise
from tandem.router.admission.capacity import (
    COMPLETION_TOKENS_LIKELY,
    has_capacity,
    queued_max_s,
    work_s,
)
from tandem.router.admission.predict import OWN_TIMES, TtftLimit
from tandem.router.admission.tenant_queues import TenantQueues
from tandem.router.admission.turns import Claim
from tandem.router.metrics.router import Metrics
from tandem.router.placement.choose import Placement, Work
from tandem.router.workers.cluster_view import ClusterView

# Without tenants, requests take turns for this many seconds after one that has a claim of its own,
# such as a session.
_TURNS_S = 60.0
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
        """`have_tenants` returns whether requests have tenants. Then requests always take turns."""
        self._view = view
        self._have_tenants = have_tenants
        self._metrics = metrics
        self._calibration = Calibration()
        # Mean seconds that a first token takes from the worker's engine to this router's stream.
        self.wire_s = 0.0
        self._num_wires = 0
        self._turns_until = -math.inf  # monotonic time until which requests take turns
        self._limit = TtftLimit(config.ttft_limit_s, config.ttft_limit_token_s, OWN_TIMES)
        waiting_max = config.hold_requests_max
        self._tenant_queues = TenantQueues(self.has_capacity, waiting_max=waiting_max)
        view.listen(self._tenant_queues.release_next)

    def must_wait(self) -> bool:
        """Returns whether a request that arrives now would wait for its turn."""
        return self.take_turns and self._tenant_queues.must_wait()

    @property
    def take_turns(self) -> bool:
        """True while requests wait here for their turns, if no worker has capacity."""
        # While some wait, later ones must not pass them.
        is_asked = self._have_tenants() or time.monotonic() < self._turns_until
        return is_asked or self._tenant_queues.have_waiting

    def claim(self, asked: Claim, *, tokens_missing: int, completion_max: int) -> Claim:
        """Returns the claim of a new request with its predicted cost, if requests take turns."""
        if asked.of_class != Claim().of_class or asked.session:
            self._turns_until = time.monotonic() + _TURNS_S
        if not self.take_turns:
            return asked
        completion = min(completion_max, COMPLETION_TOKENS_LIKELY)
        return replace(asked, cost=self._work_s(tokens_missing, completion))

    def settle(self, claim: Claim, *, tokens_missing: int, num_completion: int) -> None:
        """Corrects what a request that had its turn has counted for its tenant, once the request
        has ended or has to wait for another turn."""
        self._tenant_queues.settle(claim, self._work_s(tokens_missing, num_completion))

    def admit(
        self,
        work: Work,
        placement: Placement,
        *,
        claim: Claim = Claim(),
        is_urgent: bool = False,
        waited_s: float = 0.0,
        again: bool = False,
        deadline_s: float | None = None,
    ) -> AdmissionDecision:
        """Admits a request that arrived `waited_s` ago.

        A request that waits for its turn is admitted when it arrives and, `again`, when it has its
        turn. `deadline_s` is the request's own limit of the TTFT. Raises Overloaded if the first
        token would be too late, unless the request is urgent.
        """
        demand = self._metrics.demand
        if not again:
            demand.new_request(placement.prefill_s(work))
        limit = self._limit_of(work, deadline_s)
        if is_urgent or not limit.base_s or self._view.redis_state != "ok":
            return AdmissionDecision(0.0)
        decision = admit(
            work,
            placement,
            limit,
            self._calibration,
            ahead_s=0.0 if again else self._ahead_s(claim),
            waited_s=waited_s,
            completion_tokens=demand.output_tokens_mean,
            now=time.monotonic(),
        )
        if decision.is_admitted:
            return decision
        late_s = decision.late_s
        limit_s = limit.seconds(work.num_tokens)
        log.info(
            "refused a request, because its first token would come %d s after the limit of "
            "--ttft-limit or its own deadline. Its best placement was: %s",
            math.ceil(late_s),
            placement.summary,
        )
        raise Overloaded(
            "all workers are busy: the first token would take longer than the limit of "
            f"{limit_s:g} s; try again in {math.ceil(late_s)} s",
            retry_after_s=late_s,
        )

    def _limit_of(self, work: Work, deadline_s: float | None) -> TtftLimit:
        """Returns the limit of a request's TTFT: the router's limit, or the request's own deadline
        if that is shorter."""
        own = self._limit
        if deadline_s is None or (own.base_s and own.seconds(work.num_tokens) <= deadline_s):
            return own
        return TtftLimit(deadline_s)

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
    async def turn(self, claim: Claim, *, until: float = math.inf) -> AsyncIterator[None]:
        """Waits for the request's turn if requests take turns.

        The `with` block must submit the request. `until` is the monotonic time after which the
        request is of no use. Raises Overloaded and QueueFull.
        """
        if not self.take_turns:
            yield
            return
        with ExitStack() as pending:
            pending.enter_context(self._metrics.requests_pending.track_inprogress())
            async with self._tenant_queues.turn(claim, until=until):
                pending.close()
                yield

    def has_capacity(self) -> bool:
        """Returns whether the workers would begin one more request soon."""
        if self._view.redis_state != "ok":
            return True
        return has_capacity(
            self._view.snapshots(),
            queued_max_s=queued_max_s(self._limit.base_s, self._calibration),
            completion_tokens=self._metrics.demand.output_tokens_mean,
        )

    def _ahead_s(self, claim: Claim) -> float:
        if not self.take_turns:
            return 0.0
        num_usable = sum(w.usable for w in self._view.snapshots())
        return self._tenant_queues.cost_ahead(claim) / max(1, num_usable)

    def _work_s(self, tokens_missing: int, num_completion: int) -> float:
        return work_s(self._view.snapshots(), tokens_missing, num_completion)
