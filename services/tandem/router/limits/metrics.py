"""Metrics by tenant. The first TENANTS_MAX tenants have a label each; all others share "other"."""

from prometheus_client import CollectorRegistry

from tandem.net.observability.metrics import MetricSet, counter

TENANTS_MAX = 100
OTHER = "other"


class TenantMetrics(MetricSet):
    """Counters of tenants' served requests, of their tokens, and of requests refused by limits."""

    requests = counter(
        "tandem_tenant_requests", "Requests of the tenant that were served", "tenant"
    )
    tokens = counter(
        "tandem_tenant_tokens",
        "Tokens of the tenant's served requests: prompt, cached (part of prompt) and completion",
        "tenant",
        "kind",
    )
    refusals = counter(
        "tandem_tenant_limit_refusals",
        "Requests of the tenant that a limit refused: requests, tokens or concurrent",
        "tenant",
        "limit",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._named: set[str] = set()

    def served(self, tenant: str, prompt: int, cached: int, completion: int) -> None:
        label = self._label(tenant)
        self.requests.labels(tenant=label).inc()
        for kind, count in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            self.tokens.labels(tenant=label, kind=kind).inc(count)

    def refused(self, tenant: str, limit: str) -> None:
        self.refusals.labels(tenant=self._label(tenant), limit=limit).inc()

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= TENANTS_MAX:
                return OTHER
            self._named.add(tenant)
        return tenant
