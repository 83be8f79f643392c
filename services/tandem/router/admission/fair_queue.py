"""Orders waiting requests so that each tenant gets its share of the work. Does no I/O.

This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each request has a start and
an end on a virtual clock, which counts work instead of seconds:
    start = the end of the tenant's previous request, or the current virtual time if that is later
    end   = start + cost / weight
The request with the lowest start is served next, and its start becomes the current virtual time.
Equal starts are served in order of arrival. If ever new tenants arrive, their starts would stop the
virtual time, and those that have been served before would starve. So the virtual time also grows by
the served work, divided by the sum of the weights, up to the lowest start of the others.

    tenant    cost    weight    starts of its requests
    A           10         1    0, 10, 20, ...
    B           10         2    0,  5, 10, 15, 20, ...
Both tenants begin to wait at virtual time 0. For each request of A, two requests of B are served.

A new tenant waits for at most one request of each other tenant that has been served. No tenant
starves, because the start of its first waiting request stays constant while the other tenants'
starts and the virtual time grow. The requests of one tenant are served in order of arrival.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    start: float  # virtual time at which the tenant's first waiting request starts
    is_new: bool  # True: the tenant was not served since it began to wait, and owes nothing
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
        self._step = 0.0  # by which the virtual time grows when the next request is served
        self._number = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, cost: float, item: T, *, weight: float = 1.0) -> None:
        assert min(cost, weight) > 0, (cost, weight)
        queue = self._queues.get(tenant)
        if queue is None:
            end = self._ends.pop(tenant, 0.0)
            is_new = end <= self._now
            queue = self._queues[tenant] = _TenantQueue(max(self._now, end), is_new)
        self._number += 1
        queue.waiting[item] = (self._number, cost, cost / weight)
        queue.cost += cost
        queue.span += cost / weight
        self._size += 1

    @property
    def cost(self) -> float:
        """Sum of the costs of all waiting items."""
        return sum(queue.cost for queue in self._queues.values())

    def pop(self, pick: Callable[[str], T] | None = None) -> T:
        """Removes and returns the next item. Raises IndexError if the queue is empty.

        `pick` returns the item to serve of the tenant whose turn it is. None: the first one.
        """
        if not self._queues:
            raise IndexError("the queue is empty")
        tenant = min(self._queues, key=self._turn)
        queue = self._queues[tenant]
        item = pick(tenant) if pick is not None else next(iter(queue.waiting))
        step = queue.waiting[item][1] / self._weights()
        self._now = max(self._now, queue.start)
        queue.start += self._take(tenant, queue, item)
        queue.is_new = False
        if tenant not in self._queues:
            self._ends[tenant] = queue.start
        starts = (q.start for q in self._queues.values() if not q.is_new)
        self._now = max(self._now, min(self._now + self._step, *starts, math.inf))
        self._step = step
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

    def charge(self, tenant: str, span: float) -> None:
        """Moves the tenant's next start by `span`, a cost / weight, but not into the past."""
        queue = self._queues.get(tenant)
        if queue is not None:
            queue.start = max(min(self._now, queue.start), queue.start + span)
        elif (end := self._ends.get(tenant, self._now) + span) > self._now:
            self._ends[tenant] = end
        else:
            self._ends.pop(tenant, None)

    def longest(self, tenants: Collection[str] | None = None) -> str:
        """Returns the tenant whose waiting items have the largest sum of cost / weight; of equal
        ones the tenant with the newest item. Only `tenants` are considered; None: all."""
        return max(self._queues if tenants is None else tenants, key=self._length)

    def newest(self, tenant: str) -> T:
        return next(reversed(self._queues[tenant].waiting))

    def cost_ahead(self, tenant: str, own_ahead: float | None = None) -> float:
        """Estimates the cost of the requests that are served before a new request of this tenant.

        `own_ahead` is the cost of the tenant's own requests among them. None: all that wait. The
        estimate assumes that all requests of one tenant have the same weight.
        """
        own = self._queues.get(tenant)
        if own is None:
            ahead = 0.0
            start = max(self._now, self._ends.get(tenant, 0.0))
        else:
            ahead = own.cost if own_ahead is None else min(own_ahead, own.cost)
            part = ahead / own.cost if own.cost > 0 else 1.0
            start = own.start + own.span * part
        others = (q.cost_until(start) for name, q in self._queues.items() if name != tenant)
        return ahead + sum(others)

    def _weights(self) -> float:
        """Returns the sum of the weights of the tenants with waiting requests."""
        firsts = (next(iter(queue.waiting.values())) for queue in self._queues.values())
        return sum(cost / span for _, cost, span in firsts)

    def _turn(self, tenant: str) -> tuple[float, int]:
        queue = self._queues[tenant]
        number, _, _ = next(iter(queue.waiting.values()))
        return queue.start, number

    def _length(self, tenant: str) -> tuple[float, int]:
        queue = self._queues[tenant]
        number, _, _ = queue.waiting[self.newest(tenant)]
        return queue.span, number

    def _take(self, tenant: str, queue: _TenantQueue[T], item: T) -> float:
        """Removes an item from its queue and returns its cost / weight."""
        _, cost, span = queue.waiting.pop(item)
        queue.cost -= cost
        queue.span -= span
        self._size -= 1
        if not queue.waiting:
            del self._queues[tenant]
        return span
