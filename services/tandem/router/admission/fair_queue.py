"""Orders waiting requests so that each tenant gets its share of the work. Does no I/O.

This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each request has a start and
an end on a virtual clock, which counts work instead of seconds:
    start = the end of the tenant's previous request, or the current virtual time if that is later
    end   = start + cost / weight
The request with the lowest start is served next, and its start becomes the current virtual time.
Equal starts are served in order of arrival.

    tenant    cost    weight    starts of its requests
    A           10         1    0, 10, 20, ...
    B           10         2    0,  5, 10, 15, 20, ...
Both tenants begin to wait at virtual time 0. For each request of A, two requests of B are served.

A new tenant waits for at most one request of each other tenant. No tenant starves, because the
start of its first waiting request stays constant while the other tenants' starts grow. The requests
of one tenant are served in order of arrival.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    start: float  # virtual time at which the tenant's first waiting request starts
    cost: float = 0.0  # sum of the costs of the tenant's waiting requests
    span: float = 0.0  # sum of cost / weight of the tenant's waiting requests
    # waiting request -> (arrival number, cost, cost / weight), in order of arrival
    waiting: dict[T, tuple[int, float, float]] = field(default_factory=dict)

    def cost_until(self, start: float) -> float:
        """Returns the cost of this tenant's requests that start before the virtual time `start`.

        The cost of a request that starts before `start` and ends after it counts in proportion.
        """
        if start <= self.start:
            return 0.0
        return self.cost * (start - self.start) / max(self.span, start - self.start)


class FairQueue(Generic[T]):
    """A queue of items in which tenants take turns. Costs and weights must be positive.

    The items of one tenant must differ from each other.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        # tenant without a waiting request -> virtual time at which the tenant's last request ends
        # (only times later than the current virtual time `_now`)
        self._ends: dict[str, float] = {}
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
        """Removes and returns the next item. Raises IndexError if the queue is empty."""
        if not self._queues:
            raise IndexError("the queue is empty")
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
        """Forgets how much work was served to each tenant. The queue must be empty."""
        assert not self._queues
        self._ends.clear()

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item without serving it. The item does not count as work of its tenant.

        Returns False if the item is not in the queue.
        """
        queue = self._queues.get(tenant)
        if queue is None or item not in queue.waiting:
            return False
        self._take(tenant, queue, item)
        if tenant not in self._queues and queue.start > self._now:
            self._ends[tenant] = queue.start
        return True

    def cost_ahead(self, tenant: str) -> float:
        """Estimates the cost of the requests that are served before a new request of this tenant.

        The estimate assumes that all requests of one tenant have the same weight.
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
        """Removes an item from its queue and returns its cost / weight."""
        _, cost, span = queue.waiting.pop(item)
        queue.cost -= cost
        queue.span -= span
        self._size -= 1
        if not queue.waiting:
            del self._queues[tenant]
        return span
