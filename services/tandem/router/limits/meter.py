"""Counts what requests use of their tenants' limits, and the tenants' total usage."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tandem.common.config.cluster import ClusterConfig
from tandem.net.security.limits import Limits
from tandem.net.store.client import Client
from tandem.router.limits.counts import TenantCounts
from tandem.router.limits.limiter import Limiter, LimitReservation
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.limits.usage import UsageMeter
from tandem.router.limits.usage_store import UsageStore


class TenantMeter:
    """Applies the limits of tenants on one router, and counts their usage.

    The caller must run `limiter.run` and `usage.run` as tasks.
    """

    def __init__(
        self, limiter: Limiter, usage: UsageMeter, *, is_limited: Callable[[str], bool]
    ) -> None:
        """`is_limited` returns whether any key of a tenant has limits."""
        self.limiter = limiter
        self.usage = usage
        self._is_limited = is_limited

    def reserved(
        self, tenant: str, limits: Limits, tokens: int
    ) -> AbstractAsyncContextManager[LimitReservation]:
        """Reserves one request and `tokens` tokens in a tenant's limits during a `with` block.

        `tokens` is the most that the request may use. If the block does not call `settle`, the
        request counts as not served, and the reservation is given back. Raises RateLimited.
        """
        is_counted = self._is_limited(tenant)
        return self.limiter.reserved(tenant, limits, tokens, is_counted=is_counted)

    def settle(
        self,
        reservation: LimitReservation,
        tenant: str,
        *,
        prompt: int,
        cached: int,
        completion: int,
    ) -> None:
        """Counts the tokens that a request used, and gives back the rest of its reservation.

        Further calls have no effect.
        """
        if reservation.is_settled:
            return
        self.limiter.settle(reservation, prompt + completion)
        self.usage.add(tenant, prompt=prompt, cached=cached, completion=completion)


def make_meter(
    redis: Client,
    cluster: ClusterConfig,
    router_id: str,
    metrics: TenantMetrics,
    *,
    num_routers: Callable[[], int],
    is_limited: Callable[[str], bool],
) -> TenantMeter:
    counts = TenantCounts(redis, cluster.cluster_id, router_id)
    limiter = Limiter(counts, metrics, num_routers=num_routers)
    usage = UsageMeter(UsageStore(redis, cluster.cluster_id, router_id), metrics)
    return TenantMeter(limiter, usage, is_limited=is_limited)
