"""Orders waiting requests so that each tenant gets its share of the work. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each tenant's first request has a
start: where the one before it ended, in work of that tenant, or where the queue is now if none
waited. The lowest start goes next, and it is where the queue is now; among equals who came first.

While two tenants wait, what was served of them differs by at most one request of each; one that
comes new waits for at most one request of each other; a tenant alone is served in order.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    start: float  # of its first request
    cost: float = 0.0  # of all that wait
    waiting: dict[T, tuple[int, float]] = field(default_factory=dict)  # number and cost, in order


class FairQueue(Generic[T]):
    """Fair queue over tenants. Items are compared by equality; costs are positive, in any unit."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._ends: dict[str, float] = {}  # of tenants that were served and have nobody waiting
        self._now = 0.0
        self._number = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, cost: float, item: T) -> None:
        assert cost > 0, cost
        queue = self._queues.get(tenant)
        if queue is None:
            start = max(self._now, self._ends.pop(tenant, 0.0))
            queue = self._queues[tenant] = _TenantQueue(start)
        self._number += 1
        queue.waiting[item] = (self._number, cost)
        queue.cost += cost
        self._size += 1

    def pop(self) -> T:
        """Removes and returns the next item. Raises IndexError if nothing waits."""
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
        """Forgets what was served. Call it when all were served: nobody is owed anything."""
        assert not self._queues
        self._ends.clear()

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item that waits no more, at no cost to its tenant; False if it is not here."""
        queue = self._queues.get(tenant)
        if queue is None or item not in queue.waiting:
            return False
        self._take(tenant, queue, item)
        if tenant not in self._queues and queue.start > self._now:
            self._ends[tenant] = queue.start
        return True

    def cost_ahead(self, tenant: str) -> float:
        """Returns the cost that is served before a new request of this tenant, except for the last
        request of each other tenant."""
        own = self._queues.get(tenant)
        start = own.start + own.cost if own else max(self._now, self._ends.get(tenant, 0.0))
        others = (
            min(queue.cost, max(0.0, start - queue.start))
            for name, queue in self._queues.items()
            if name != tenant
        )
        return (own.cost if own else 0.0) + sum(others)

    def _turn(self, tenant: str) -> tuple[float, int]:
        queue = self._queues[tenant]
        number, _ = next(iter(queue.waiting.values()))
        return queue.start, number

    def _take(self, tenant: str, queue: _TenantQueue[T], item: T) -> float:
        _, cost = queue.waiting.pop(item)
        queue.cost -= cost
        self._size -= 1
        if not queue.waiting:
            del self._queues[tenant]
        return cost
