"""Queues in the router, in which requests wait until the workers have capacity.

A worker serves its own queue in order of arrival, whatever the tenant, session and priority. So the
router keeps the workers' queues short, and the requests take turns in the router (`turns.py`).

A request passes through two states here:
- waiting: The request waits until the workers have capacity and it is the request's turn. If the
  client leaves, the deadline passes or the request is shed, the request is removed at no cost to
  its tenant.
- released: The request may be submitted to workers. The next request is released only when this
  request has been submitted or has failed, so that the workers' load already includes it.
If there is capacity and no request waits, a new request is released at once.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.errors import Overloaded, QueueFull
from tandem.router.admission.turns import Claim, Turns

_RETRY_AFTER_S = 1.0


class TenantQueues:
    """The requests that wait in the router for their turns.

    The caller must call `release_next` whenever the workers may have gained capacity.
    """

    def __init__(self, has_capacity: Callable[[], bool], *, waiting_max: int = 256) -> None:
        # Largest number of waiting requests of all tenants together. If one more arrives, one of
        # them is refused with QueueFull.
        self.waiting_max = waiting_max
        self._has_capacity = has_capacity
        self._queue: Turns[asyncio.Future[None]] = Turns()
        self._is_releasing = False

    @property
    def have_waiting(self) -> bool:
        return len(self._queue) > 0

    def must_wait(self) -> bool:
        """Returns whether a request that arrives now would wait."""
        return self.have_waiting or not self._has_capacity()

    def cost_ahead(self, claim: Claim) -> float:
        return self._queue.cost_ahead(claim)

    def settle(self, claim: Claim, cost: float) -> None:
        """Corrects what a request that had its turn counts, as in `Turns.settle`."""
        self._queue.settle(claim, cost)

    @asynccontextmanager
    async def turn(self, claim: Claim, *, until: float = math.inf) -> AsyncIterator[None]:
        """Waits for the request's turn. The `with` block must submit the request without delay.

        `until` is the monotonic time in seconds after which the request is of no use. Raises
        Overloaded if this time passes, and QueueFull if too many requests wait and this one has to
        go.
        """
        released = asyncio.get_running_loop().create_future()
        self._queue.push(claim, released)
        if len(self._queue) > self.waiting_max:
            self._refuse_last()
        self.release_next()
        try:
            async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
                # Without the shield, a cancellation of this task would cancel `released` too. Then
                # `release_next` could not set the result of `released` any more.
                await asyncio.shield(released)
        except (asyncio.CancelledError, TimeoutError) as error:
            was_waiting = self._queue.remove(released)
            if isinstance(error, TimeoutError):
                if was_waiting:
                    raise Overloaded(
                        "all workers are busy: the request has waited until its first token would "
                        "come too late; try again later",
                        retry_after_s=_RETRY_AFTER_S,
                    ) from None
                released.result()  # raises QueueFull if the request was refused just before
            else:
                if not was_waiting and released.exception() is None:
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

    def _refuse_last(self) -> None:
        last = self._queue.last()
        self._queue.remove(last)
        last.set_exception(
            QueueFull(
                f"{len(self._queue)} requests already wait for capacity at the workers, which is "
                "the maximum; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        )

    def _submitted(self) -> None:
        self._is_releasing = False
        self.release_next()
