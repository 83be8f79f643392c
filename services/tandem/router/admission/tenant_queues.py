"""Requests wait here for capacity at the workers, when the router tells tenants apart.

    turn --capacity, nobody before it--> let go --> submitted (or not placed): the next is let go
         --no capacity--> waiting --capacity, and its tenant's turn--> let go
                                  --its client goes--> out of the queue, at no cost to its tenant

One is let go at a time: what it takes shows in the workers' load before the next is weighed. In the
workers' own queues a request waits in order of arrival, so these are kept short.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import QueueFull
from tandem.router.admission.fair_queue import FairQueue

_RETRY_AFTER_S = 1.0


class TenantQueues:
    """The requests that wait for a turn. Call `let_go` whenever there may be capacity."""

    def __init__(self, has_capacity: Callable[[], bool], *, waiting_max: int = 256) -> None:
        self.waiting_max = waiting_max  # of all tenants; beyond it QueueFull
        self._has_capacity = has_capacity
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._one_is_going = False

    def must_wait(self) -> bool:
        """Returns whether a request that came now would wait."""
        return len(self._queue) > 0 or not self._has_capacity()

    def cost_ahead(self, tenant: str) -> float:
        return self._queue.cost_ahead(tenant)

    @asynccontextmanager
    async def turn(self, tenant: str, cost: float, *, weight: float = 1.0) -> AsyncIterator[None]:
        """Waits for the tenant's turn; the body submits the request without delay.

        Raises QueueFull when too many wait already.
        """
        if len(self._queue) >= self.waiting_max:
            raise QueueFull(
                f"{len(self._queue)} requests wait for capacity at the workers; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        going = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, cost, going, weight=weight)
        self.let_go()
        try:
            # Shielded: one whose client goes is let go of like any other until it has heard of it.
            await asyncio.shield(going)
        except asyncio.CancelledError:
            if not self._queue.remove(tenant, going):
                self._went()
            raise
        try:
            yield
        finally:
            self._went()

    def let_go(self) -> None:
        if self._queue and not self._one_is_going and self._has_capacity():
            self._one_is_going = True
            self._queue.pop().set_result(None)
            if not self._queue:
                self._queue.forget()

    def _went(self) -> None:
        self._one_is_going = False
        self.let_go()
