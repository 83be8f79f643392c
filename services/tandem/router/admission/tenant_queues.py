"""Queues in the router, in which tenants' requests wait until the workers have capacity.

A worker serves its own queue in order of arrival, whatever the tenant. So the router keeps the
workers' queues short, and the tenants take turns in the router.

A request passes through two states here:
- waiting: The request is in its tenant's queue until the workers have capacity and it is the
  tenant's turn. If the client leaves, the request is removed at no cost to its tenant.
- released: The request may be submitted to workers. The next request is released only when this
  request has been submitted or has failed, so that the workers' load already includes it.
If there is capacity and no request waits, a new request is released at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import QueueFull
from tandem.router.admission.fair_queue import FairQueue

_RETRY_AFTER_S = 1.0


class TenantQueues:
    """The requests that wait in the router for their tenants' turns.

    The caller must call `release_next` whenever the workers may have gained capacity.
    """

    def __init__(self, has_capacity: Callable[[], bool], *, waiting_max: int = 256) -> None:
        # Largest number of waiting requests of all tenants together. One more raises QueueFull.
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
        """Waits for the tenant's turn. The `with` block must submit the request without delay.

        Raises QueueFull if too many requests wait already.
        """
        if len(self._queue) >= self.waiting_max:
            raise QueueFull(
                f"{len(self._queue)} requests already wait for capacity at the workers, which is "
                "the maximum; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        released = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, cost, released, weight=weight)
        self.release_next()
        try:
            # Without the shield, a cancellation of this task would cancel `released` too. Then
            # `release_next` could not set the result of `released` any more.
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
