"""The endpoint picker: a service that an inference gateway calls to choose the decode worker for a
request. Each decode worker has a front, which is a router beside the worker. The picker answers
with the HOST:PORT of the chosen worker's front, and the gateway sends the request to this front.

  1. The picker tokenizes the prompt.
  2. The picker looks up, in the prefix tree, how much of the prompt each worker has cached.
  3. The picker chooses a decode worker with the same placement policy as a router.
  4. The picker adds a signed hint to the request's headers. The hint tells the front which workers
     were chosen.

Only decode workers that have a front can be chosen. If the gateway names a subset of endpoints,
only workers of this subset can be chosen. If a request cannot be parsed or has an unknown API key,
the picker chooses a worker at random, and that worker's front answers with the error. This module
does not depend on the gateway's protocol.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.api.gateway.fronts import FrontTable
from tandem.api.gateway.prompts import named_model, read_request
from tandem.api.served_model import ServedModel
from tandem.common.config.router import RouterConfig
from tandem.errors import NoWorkers, Overloaded, QueueFull, TandemError
from tandem.net.security.access import Access
from tandem.router.admission.tenants import TENANT_HEADER, limits_of, tenant_of
from tandem.router.metrics.timeline import Timeline
from tandem.router.placement.choose import Placement
from tandem.router.placement.hint import PlacementHint, sign
from tandem.router.request.generator import REQUESTS_MAX
from tandem.router.request.job import Job
from tandem.router.request.models import Models
from tandem.router.request.request import ClientRequest
from tandem.router.request.session import session_of
from tandem.router.request.urgency import waiting_of

OBJECTIVE_HEADER = "x-gateway-inference-objective"
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class PickRequest:
    """A request, as the gateway describes it to the picker."""

    path: str
    headers: Mapping[str, Sequence[str]]  # values of each header, by its lower-case name
    request_id: str  # value of the header x-request-id, or a new id if the client sent none
    # endpoints or hosts that may be picked; None: all endpoints
    subset: frozenset[str] | None = None

    def values(self, name: str) -> list[str]:
        return list(self.headers.get(name, ()))


@dataclass(frozen=True, slots=True)
class Pick:
    """The answer to a gateway: the endpoints for a request, the best endpoint first."""

    endpoints: tuple[str, ...]
    hint: str = ""  # signed names of the chosen workers, which the front reads; empty: no hint
    # The router counts this job as load of the chosen workers until `release` is called.
    job: Job | None = None
    model: ServedModel | None = None  # the model that the request is for


class EndpointPicker:
    """Picks endpoints for the requests of a gateway. If the caller sees the response to a request,
    the caller passes the request's pick to `release`."""

    def __init__(
        self,
        config: RouterConfig,
        served: Sequence[ServedModel],
        fronts: FrontTable,
        access: Access,
    ) -> None:
        self._config = config
        self._served = {each.generator: each for each in served}
        self._models = Models(*self._served)
        self.fronts = fronts
        self.access = access
        self._rng = random.Random()
        self._num_open = 0  # requests for which an endpoint is being picked now

    async def pick(self, pick_request: PickRequest, body: bytes) -> Pick:
        """Picks endpoints for a request. Raises NoWorkers if no endpoint is usable. Raises
        QueueFull or Overloaded if the cluster has no capacity for the request."""
        model = self._model_for(pick_request, body)
        picks = model.metrics.picks
        self._num_open += 1
        try:
            pick = await self._pick(model, pick_request, body)
        except TandemError as error:
            picks.labels(reason=error.code).inc()
            raise
        finally:
            self._num_open -= 1
        reason = "unread"
        if pick.job is not None and pick.job.routing.routed is not None:
            reason = pick.job.routing.routed.kind
        picks.labels(reason=reason).inc()
        return pick

    def _model_for(self, pick_request: PickRequest, body: bytes) -> ServedModel:
        """Returns the model of a request. If the request names no model of this cluster, its front
        will refuse it, and may be that of the first model."""
        if len(self._served) == 1:
            return self._served[self._models.first]
        try:
            key = self.access.check("user", pick_request.values("authorization"), now=time.time())
            named = named_model(pick_request.path, body)
            return self._served[self._models.of(named, limits_of(key))]
        except TandemError:
            return self._served[self._models.first]

    def release(self, pick: Pick, *, has_token: bool) -> None:
        """Stops counting the request as load of the picked workers. The caller calls this when the
        response has started or ended. Repeated calls have no effect."""
        if pick.job is not None and pick.model is not None:
            pick.model.dispatcher.note_elsewhere(pick.job, has_token=has_token)

    async def _pick(self, model: ServedModel, pick_request: PickRequest, body: bytes) -> Pick:
        if self._num_open > REQUESTS_MAX:
            raise QueueFull(
                f"this endpoint picker already places {REQUESTS_MAX} requests, which is the "
                "maximum; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        endpoints = self._endpoints(model, pick_request.subset)
        priority = self._priority(pick_request)
        if priority < 0 and not model.dispatcher.admission.has_capacity():
            raise Overloaded(
                "all workers are busy, and the request's InferenceObjective has a priority below 0 "
                "(--objectives); try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            async with asyncio.timeout(model.config.hold_deadline_s):
                job = await self._prepare(model, pick_request, body)
                if job is None:
                    return Pick(self._with_fallbacks(self._rng.choice(list(endpoints)), endpoints))
                if priority > 0:
                    job.routing.is_urgent = job.routing.has_turn = True
                placement = await self._place(model, job, endpoints)
        except TimeoutError:
            raise QueueFull(
                "no worker could be chosen for the request within "
                f"{model.config.hold_deadline_s:g} s; try again",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        worker_id = placement.decode.worker_id
        prefill = placement.prefill_candidates
        hint = PlacementHint(
            pick_request.request_id,
            time.time(),
            worker_id,
            prefill[0].worker_id if prefill else "",
        )
        signed = sign(hint, self._config.cluster.token)
        return Pick(self._with_fallbacks(worker_id, endpoints), signed, job, model)

    def _endpoints(self, model: ServedModel, subset: frozenset[str] | None) -> dict[str, str]:
        """Returns a dict with the model's ready decode workers whose front is in `subset`: worker
        id -> endpoint of the front. Raises NoWorkers if there are none."""
        usable = {w.worker_id for w in model.view.snapshots() if w.usable and w.role == "decode"}
        found = {
            worker_id: endpoint
            for worker_id, endpoint in self.fronts.endpoints.items()
            if worker_id in usable
            and (subset is None or endpoint in subset or endpoint.rpartition(":")[0] in subset)
        }
        if not usable:
            model.awaited_until = time.monotonic() + model.config.hold_deadline_s
        if not found:
            among = "" if subset is None else " among the endpoints that the gateway allows"
            raise NoWorkers(
                f"no decode worker with a router in front of it (--front-of) is ready{among}; "
                "try again",
                retry_after_s=RETRY_AFTER_S,
            )
        return found

    def _with_fallbacks(self, worker_id: str, endpoints: Mapping[str, str]) -> tuple[str, ...]:
        others = [endpoint for other, endpoint in endpoints.items() if other != worker_id]
        num_others = min(len(others), self._config.gateway.picker_fallbacks)
        return endpoints[worker_id], *self._rng.sample(others, num_others)

    def _priority(self, pick_request: PickRequest) -> int:
        named = pick_request.values(OBJECTIVE_HEADER)
        return self._config.gateway.objectives.get(named[0], 0) if len(named) == 1 else 0

    async def _prepare(
        self, served: ServedModel, pick_request: PickRequest, body: bytes
    ) -> Job | None:
        """Tokenizes the request's prompt. Returns None if the request has no prompt, or if the
        front will refuse the request."""
        generator = served.generator
        model = generator.model
        try:
            request = read_request(pick_request.path, body, pick_request.request_id)
            if request is None or model is None:
                return None
            request = self._with_tenant(pick_request, request)
            return await generator.prepare(request, model, Timeline(), generator.together())
        except TandemError:
            return None

    def _with_tenant(self, pick_request: PickRequest, request: ClientRequest) -> ClientRequest:
        """Returns the request with the tenant and the session set. The hashes of the request's KV
        blocks depend on the tenant."""
        key = self.access.check("user", pick_request.values("authorization"), now=time.time())
        named = pick_request.values(TENANT_HEADER)
        tenant = tenant_of(key, named, trusted=self._config.trust_tenant_header)
        session = session_of(pick_request.values) or request.session
        waiting = waiting_of(pick_request.values)
        return replace(request, tenant=tenant, session=session, limits=limits_of(key), **waiting)

    async def _place(self, model: ServedModel, job: Job, endpoints: Mapping[str, str]) -> Placement:
        """Chooses the workers for the job. Only decode workers with an entry in `endpoints` can be
        chosen."""
        others = [w for w in model.view.snapshots() if w.worker_id not in endpoints]
        job.routing.refused |= {w.epoch for w in others if w.role == "decode" or w.decodes}
        placement = await model.dispatcher.place(job)
        if placement is None or placement.decode.worker_id not in endpoints:
            model.dispatcher.note_elsewhere(job, has_token=False)
            raise NoWorkers(
                "all decode workers that could take the request have just left the cluster; try "
                "again",
                retry_after_s=RETRY_AFTER_S,
            )
        return placement
