"""The queues of the tenants' requests that wait in the router for capacity.

    turn     --capacity, and no request waits------> released
             --otherwise---------------------------> waiting
    waiting  --capacity, and its tenant's turn-----> released
             --its client leaves-------------------> removed, at no cost to its tenant
    released --submitted, or cannot be placed------> the next request may be released
One request is released at a time, so that the workers' load includes it before the next decision.
The workers' own queues are in order of arrival, not by tenant, so they are kept short.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import QueueFull
from tandem.router.admission.fair_queue import FairQueue

_RETRY_AFTER_S = 1.0


class TenantQueues:
    """The requests that wait for a turn.

    `release_next` must be called whenever there may be capacity.
    """

    def __init__(self, has_capacity: Callable[[], bool], *, waiting_max: int = 256) -> None:
        # largest number of waiting requests of all tenants; a further request raises QueueFull
        self.waiting_max = waiting_max
        self._has_capacity = has_capacity
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._is_releasing = False

    def must_wait(self) -> bool:
        """Returns whether a request that arrives now would wait."""
        return len(self._queue) > 0 or not self._has_capacity()

    def cost_ahead(self, tenant: str) -> float:
        return self._queue.cost_ahead(tenant)

    @asynccontextmanager
    async def turn(self, tenant: str, cost: float, *, weight: float = 1.0) -> AsyncIterator[None]:
        """Waits for the tenant's turn; the `with` block must submit the request without delay.

        Raises QueueFull if too many requests wait already.
        """
        if len(self._queue) >= self.waiting_max:
            raise QueueFull(
                f"{len(self._queue)} requests wait for capacity at the workers; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        released = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, cost, released, weight=weight)
        self.release_next()
        try:
            # Shielded: `release_next` may release a request whose task is being cancelled.
            await asyncio.shield(released)
        except asyncio.CancelledError:
            if not self._queue.remove(tenant, released):
                self._submitted()
            raise
        try:
            yield
        finally:
            self._submitted()

    def release_next(self) -> None:
        if self._queue and not self._is_releasing and self._has_capacity():
            self._is_releasing = True
            self._queue.pop().set_result(None)
            if not self._queue:
                self._queue.forget()

    def _submitted(self) -> None:
        self._is_releasing = False
        self.release_next()
