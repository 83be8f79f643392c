"""Queues in the router, in which tenants' requests wait until the workers have capacity.

Workers serve their own queues in order of arrival, whatever the tenant. So the queues of the
workers are kept short, and the tenants take turns here.

A request passes through two states here:
- waiting: The request is in its tenant's queue until the workers have capacity and it is the
  tenant's turn. If the client leaves, the request is removed at no cost to its tenant.
- released: The request may be submitted to workers. The next request is released only after this
  one was submitted or could not be placed, so that the workers' load includes this one by then.
If there is capacity and no request waits, a new request is released at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import QueueFull
from tandem.router.admission.fair_queue import FairQueue

_RETRY_AFTER_S = 1.0


class TenantQueues:
    """The requests that wait for a turn.

    The caller must call `release_next` whenever the workers may have gained capacity.
    """

    def __init__(self, has_capacity: Callable[[], bool], *, waiting_max: int = 256) -> None:
        # largest number of waiting requests, all tenants together; one more raises QueueFull
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
                f"{len(self._queue)} requests wait for capacity at the workers; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        released = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, cost, released, weight=weight)
        self.release_next()
        try:
            # The shield keeps a cancellation of this task from cancelling `released`, because
            # `release_next` may still set the result of `released`.
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
