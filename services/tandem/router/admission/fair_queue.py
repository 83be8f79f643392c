"""Orders waiting requests so that each tenant gets its share of the work. Pure.

This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each tenant's first request
has a start time on a virtual clock that counts the tenant's work. It is the end of the tenant's
previous request, or the queue's current time if none waited. The lowest start is served next and
becomes the queue's current time; equal starts are served in order of arrival. A request of weight 2
advances its tenant's clock half as much as one of weight 1, so its tenant gets twice the work.
While two tenants wait, the work served to each, divided by its weight, differs by at most one
request of each. A new tenant waits for at most one request of each other tenant. No tenant starves,
because its start stays constant while the others' starts grow. A single tenant is served in order.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    start: float  # start of its first request
    cost: float = 0.0  # total of the waiting requests
    span: float = 0.0  # total of cost / weight of the waiting requests
    # item -> (number, cost, span), in order of arrival
    waiting: dict[T, tuple[int, float, float]] = field(default_factory=dict)

    def cost_until(self, start: float) -> float:
        """Returns the cost of the waiting requests before `start`, as if requests could be
        split.
        """
        if start <= self.start:
            return 0.0
        return self.cost * (start - self.start) / max(self.span, start - self.start)


class FairQueue(Generic[T]):
    """A fair queue over tenants. Items are compared by equality; costs and weights are positive."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._ends: dict[str, float] = {}  # tenants that were served and have no waiting request
        self._now = 0.0
        self._number = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, cost: float, item: T, *, weight: float = 1.0) -> None:
        assert min(cost, weight) > 0, (cost, weight)
        queue = self._queues.get(tenant)
        if queue is None:
            start = max(self._now, self._ends.pop(tenant, 0.0))
            queue = self._queues[tenant] = _TenantQueue(start)
        self._number += 1
        queue.waiting[item] = (self._number, cost, cost / weight)
        queue.cost += cost
        queue.span += cost / weight
        self._size += 1

    def pop(self) -> T:
        """Removes and returns the next item. Raises IndexError if none waits."""
        if not self._queues:
            raise IndexError("nobody waits")
        tenant = min(self._queues, key=self._turn)
        queue = self._queues[tenant]
        item = next(iter(queue.waiting))
        self._now = queue.start
        queue.start += self._take(tenant, queue, item)
        if tenant not in self._queues:
            self._ends[tenant] = queue.start
        self._ends = {t: end for t, end in self._ends.items() if end > self._now}
        return item

    def forget(self) -> None:
        """Resets the tenants' clocks. Call it when the queue is empty."""
        assert not self._queues
        self._ends.clear()

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item that no longer waits, at no cost to its tenant; False if it does not
        wait.
        """
        queue = self._queues.get(tenant)
        if queue is None or item not in queue.waiting:
            return False
        self._take(tenant, queue, item)
        if tenant not in self._queues and queue.start > self._now:
            self._ends[tenant] = queue.start
        return True

    def cost_ahead(self, tenant: str) -> float:
        """Returns the cost that is served before a new request of this tenant.

        It omits the last request of each other tenant, and assumes equal weights within a tenant.
        """
        own = self._queues.get(tenant)
        start = own.start + own.span if own else max(self._now, self._ends.get(tenant, 0.0))
        others = (q.cost_until(start) for name, q in self._queues.items() if name != tenant)
        return (own.cost if own else 0.0) + sum(others)

    def _turn(self, tenant: str) -> tuple[float, int]:
        queue = self._queues[tenant]
        number, _, _ = next(iter(queue.waiting.values()))
        return queue.start, number

    def _take(self, tenant: str, queue: _TenantQueue[T], item: T) -> float:
        """Removes an item from its queue and returns its span."""
        _, cost, span = queue.waiting.pop(item)
        queue.cost -= cost
        queue.span -= span
        self._size -= 1
        if not queue.waiting:
            del self._queues[tenant]
        return span
