"""Admits requests within their tenants' limits, over all routers of the cluster.

A request is counted when it is admitted, with the largest number of tokens that it may use (its
prompt and its `max_tokens`). Unused tokens are given back when the request ends.

The limiter has three states, which differ in where a request is admitted or refused:
    shared     Redis decides, with the counts of all routers
    alone      Redis is away. This router decides, within a fraction of each tenant's limits
    returning  Redis is back, but other routers may not have written their counts yet. This router
               still decides, as in the state `alone`
The fraction in the state `alone` is the fraction of the tenant's requests and tokens that this
router admitted in the minute before Redis's last answer. For a new tenant the fraction is
1 / number of routers. Example: this router admitted 30 of 40 requests of a tenant with a limit of
100 requests per minute, so it may admit 75 requests per minute.
The state changes as follows:
    shared     --Redis does not answer------------> alone
               --Redis was emptied----------------> returning
    alone      --Redis answers--------------------> returning
    returning  --RETURN_S later-------------------> shared
               --Redis does not answer------------> alone
For each tenant, only one call to Redis is in flight at a time. Requests that arrive during a call
wait, and are sent together in the next call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from tandem.errors import RateLimited
from tandem.net.security.limits import Limits
from tandem.net.store.client import UNREACHABLE
from tandem.router.limits.counts import LimitRequest, Reply, TenantCounts
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.limits.status import Standing, limit_headers, refusal
from tandem.router.limits.window import (
    Kind,
    Share,
    Window,
    bucket_of,
    exceeded,
    share_of,
)

log = logging.getLogger(__name__)

# If Redis does not answer a call within this many seconds, the router decides alone, so that
# requests do not wait for Redis.
DEADLINE_S = 0.5
TICK_S = 0.5
# Longest interval between two writes of a tenant's counts to Redis. The interval must be shorter
# than counts.LEASE_MS, after which the tenant's running requests would no longer count.
WRITE_S = 2.0
RETURN_S = 2.0
_AT_ONCE_MAX = 256  # largest number of new requests of a tenant in one call to Redis
# Largest number of simultaneous calls to Redis. Each call uses a connection of its own.
_CALLS_AT_ONCE_MAX = 8


@dataclass(slots=True, eq=False)
class LimitReservation:
    """One request and the most tokens that it may use, reserved in its tenant's limits.

    The reservation lasts from the request's admission until `settle`.
    """

    tenant: "_Tenant | None"  # None: the request is not counted
    bucket: int
    tokens: int
    headers: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class _PendingRequest:
    request: LimitRequest
    answer: asyncio.Future[LimitReservation]


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant on this router. One task makes all calls to Redis for the tenant, in sequence."""

    name: str
    window: Window = field(default_factory=Window)  # requests and tokens that this router admitted
    # The tenant's requests and tokens on the other routers, according to Redis's last answer.
    others: Window = field(default_factory=Window)
    others_running: int = 0
    running: int = 0
    share: Share | None = None
    pending: list[_PendingRequest] = field(default_factory=list)
    is_dirty: bool = False  # True: this router's counts are newer than those sent to Redis
    was_written: bool = False
    written_at: float = 0.0
    calls: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True if no request of the tenant is counted on any router any more."""
        counts = self.window.buckets or self.others.buckets
        return not (counts or self.running or self.pending or self.calls)

    def forget_old(self, now_ms: float) -> None:
        self.window.forget(now_ms)
        self.others.forget(now_ms)

    def standing(self, limits: Limits, now_ms: float) -> Standing:
        """Returns the tenant's use over all routers."""
        both = self.window.joined(self.others)
        return Standing(limits, both, self.running + self.others_running, now_ms)


class Limiter:
    """Applies the tenants' limits on one router. `run` keeps the counts in Redis up to date."""

    def __init__(
        self, counts: TenantCounts, metrics: TenantMetrics, *, num_routers: Callable[[], int]
    ) -> None:
        self._counts = counts
        self._metrics = metrics
        self._num_routers = num_routers
        self._tenants: dict[str, _Tenant] = {}
        self._has_tenants = asyncio.Event()
        # Redis's wall clock minus this router's monotonic clock, in ms.
        self._clock_ahead_ms = (time.time() - time.monotonic()) * 1000
        self._is_away = False
        self._returning_until = 0.0
        self._turns = asyncio.Semaphore(_CALLS_AT_ONCE_MAX)

    @asynccontextmanager
    async def reserved(
        self, tenant: str, limits: Limits, tokens: int, *, is_counted: bool
    ) -> AsyncIterator[LimitReservation]:
        """Reserves `tokens` for a request that runs in the `with` block. Raises RateLimited.

        If the block does not settle the reservation, the whole reservation is given back. A request
        whose own API key has limits is always counted. `is_counted` says whether a request without
        limits of its own is counted too, because another API key of the tenant has limits.
        """
        try:
            reservation = await self._reserve(tenant, limits, tokens, is_counted=is_counted)
        except RateLimited as error:
            self._metrics.refused(tenant, error.kind)
            raise
        try:
            yield reservation
        finally:
            self.settle(reservation, None)

    def settle(self, reservation: LimitReservation, tokens: int | None) -> None:
        """Ends a reservation. Further calls have no effect.

        `tokens` is the number of tokens used; None if the request was not served.
        """
        if reservation.is_settled:
            return
        reservation.is_settled = True
        if (tenant := reservation.tenant) is not None:
            tenant.running -= 1
            tenant.window.add(
                reservation.bucket,
                0 if tokens is not None else -1,
                (tokens or 0) - reservation.tokens,
            )
            self._write_soon(tenant)

    async def run(self) -> None:
        """Keeps the counts in Redis up to date, and checks whether Redis is back. Runs for ever."""
        while True:
            await self._has_tenants.wait()
            await asyncio.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        for tenant in list(self._tenants.values()):
            tenant.forget_old(self._now_ms())
            if self._is_away:
                self._call_soon(tenant)
                return  # the call for one tenant is enough to detect that Redis is back
            if now - tenant.written_at > (TICK_S if self._is_alone else WRITE_S):
                self._write_soon(tenant)
            if tenant.is_idle and not self._is_alone:
                del self._tenants[tenant.name]
        if not self._tenants:
            self._is_away = False  # the next request calls Redis, which may be back by then
            self._has_tenants.clear()

    @property
    def _is_alone(self) -> bool:
        return self._is_away or time.monotonic() < self._returning_until

    def _now_ms(self) -> float:
        return time.monotonic() * 1000 + self._clock_ahead_ms

    async def _reserve(
        self, name: str, limits: Limits, tokens: int, *, is_counted: bool
    ) -> LimitReservation:
        request = LimitRequest(limits, tokens)
        if not limits.are_counted and not is_counted:
            return LimitReservation(None, 0, tokens)
        tenant = self._tenants.setdefault(name, _Tenant(name))
        self._has_tenants.set()
        if not limits.are_counted:
            reservation = self._take(tenant, request)
            self._write_soon(tenant)
            return reservation
        if self._is_alone:
            return self._decide_alone(tenant, request)
        waiting = _PendingRequest(request, asyncio.get_running_loop().create_future())
        tenant.pending.append(waiting)
        self._call_soon(tenant)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            # If the request was admitted just before the cancellation, it has a reservation, which
            # must be given back.
            if (
                waiting.answer.done()
                and not waiting.answer.cancelled()
                and not waiting.answer.exception()
            ):
                self.settle(waiting.answer.result(), None)
            raise

    def _write_soon(self, tenant: _Tenant) -> None:
        tenant.is_dirty = True
        if not self._is_away:
            self._call_soon(tenant)

    def _call_soon(self, tenant: _Tenant) -> None:
        if tenant.calls is None:
            tenant.calls = asyncio.create_task(self._call(tenant), name="limits")

    async def _call(self, tenant: _Tenant) -> None:
        """Calls Redis until all waiting requests are answered and all counts are written.

        If Redis is lost, this router decides about the waiting requests alone.
        """
        try:
            is_first = True  # call at least once, to detect whether Redis answers
            while tenant.pending or tenant.is_dirty or is_first:
                is_first = False
                pending = [each for each in tenant.pending if not each.answer.done()]
                pending, tenant.pending = pending[:_AT_ONCE_MAX], pending[_AT_ONCE_MAX:]
                tenant.is_dirty = False
                reply = await self._call_redis(tenant, [each.request for each in pending])
                if reply is None:
                    tenant.is_dirty = True
                    pending = pending + tenant.pending
                    tenant.pending = []
                    self._answer_alone(tenant, pending)
                    return
                self._answer(tenant, pending, reply)
        finally:
            tenant.calls = None

    async def _call_redis(self, tenant: _Tenant, requests: list[LimitRequest]) -> Reply | None:
        """Sends the counts and new requests to Redis; returns None if Redis is lost."""
        try:
            async with self._turns, asyncio.timeout(DEADLINE_S):
                tenant.forget_old(self._now_ms())
                reply = await self._counts.count(
                    tenant.name, tenant.running, tenant.window, requests
                )
        except (*UNREACHABLE, msgspec.DecodeError) as error:
            if not self._is_away:
                log.warning(
                    "Redis does not answer (%r), so each router enforces its own share of the "
                    "limits of API keys",
                    error,
                )
            self._is_away = True
            return None
        now = time.monotonic()
        self._clock_ahead_ms = reply.now_ms - now * 1000
        was_emptied = tenant.was_written and not reply.was_known
        if self._is_away or (was_emptied and not self._is_alone):
            log.warning(
                "Redis answers again, but was unreachable or had lost its data. For the next "
                "%g s, each router enforces its own share of the limits of API keys; after "
                "that, all routers enforce the limits together",
                RETURN_S,
            )
            self._is_away = False
            self._returning_until = now + RETURN_S
        tenant.was_written = True
        tenant.written_at = now
        return reply

    def _answer(self, tenant: _Tenant, pending: list[_PendingRequest], reply: Reply) -> None:
        if self._is_alone:
            # Redis has counted the requests that it admitted. This router decides alone and may
            # refuse some of these requests, so it must write its own counts again.
            tenant.is_dirty |= bool(pending)
            self._answer_alone(tenant, pending)
            return
        tenant.others = reply.others
        tenant.others_running = reply.others_running
        for each, kind in zip(pending, reply.refused_by, strict=True):
            if kind is None:
                self._give(each, self._take(tenant, each.request))
            elif not each.answer.done():
                each.answer.set_exception(self._refusal(tenant, kind, each.request))
        tenant.share = share_of(tenant.window.use(), reply.others.use())

    def _answer_alone(self, tenant: _Tenant, pending: list[_PendingRequest]) -> None:
        for each in pending:
            if each.answer.done():
                continue
            try:
                self._give(each, self._decide_alone(tenant, each.request))
            except RateLimited as error:
                each.answer.set_exception(error)

    def _give(self, waiting: _PendingRequest, reservation: LimitReservation) -> None:
        if waiting.answer.done():  # the client left while Redis decided
            self.settle(reservation, None)
        else:
            waiting.answer.set_result(reservation)

    def _decide_alone(self, tenant: _Tenant, request: LimitRequest) -> LimitReservation:
        """Admits a request by this router's own counts, without Redis. Raises RateLimited."""
        tenant.forget_old(self._now_ms())
        share = self._share(tenant)
        use = tenant.window.use(tenant.running)
        if kind := exceeded(request.limits, use, request.tokens, share):
            raise self._refusal(tenant, kind, request)
        reservation = self._take(tenant, request)
        self._write_soon(tenant)
        return reservation

    def _take(self, tenant: _Tenant, request: LimitRequest) -> LimitReservation:
        """Counts an admitted request in its tenant's window on this router."""
        now_ms = self._now_ms()
        reservation = LimitReservation(tenant, bucket_of(now_ms), request.tokens)
        tenant.window.add(reservation.bucket, 1, request.tokens)
        tenant.running += 1
        reservation.headers = limit_headers(self._standing(tenant, request.limits))
        return reservation

    def _refusal(self, tenant: _Tenant, kind: Kind, request: LimitRequest) -> RateLimited:
        return refusal(kind, self._standing(tenant, request.limits), request.tokens)

    def _standing(self, tenant: _Tenant, limits: Limits) -> Standing:
        if self._is_alone:
            share = self._share(tenant)
            now_ms = self._now_ms()
            return Standing(limits, tenant.window, tenant.running, now_ms, share)
        return tenant.standing(limits, self._now_ms())

    def _share(self, tenant: _Tenant) -> Share:
        one = 1 / self._num_routers()
        return tenant.share or Share(one, one)
