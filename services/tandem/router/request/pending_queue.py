"""Requests that wait for a usable decode worker, bounded in number and time."""

import asyncio

from tandem.common.config.router import RouterConfig
from tandem.errors import NoWorkers
from tandem.router.metrics.router import Metrics
from tandem.router.workers.cluster_view import ClusterView

_RETRY_AFTER_S = 1.0


class PendingQueue:
    """The pending queue of a router."""

    def __init__(self, config: RouterConfig, view: ClusterView, metrics: Metrics) -> None:
        self._config = config
        self._view = view
        self._metrics = metrics
        self.num_pending = 0

    async def wait(self, refused: frozenset[str], *, is_begun: bool) -> None:
        """Waits for a usable decode worker. Raises NoWorkers at the deadline or if the queue is
        full.

        A request that has begun (`is_begun`) is always queued. `refused` are epochs of workers that
        do not count.
        """
        if not is_begun and self.num_pending >= self._config.hold_requests_max:
            raise NoWorkers(
                f"no decode worker is ready and {self.num_pending} requests wait for one already",
                retry_after_s=_RETRY_AFTER_S,
            )
        deadline_s = self._config.hold_deadline_s
        self.num_pending += 1
        try:
            with self._metrics.requests_pending.track_inprogress():
                async with asyncio.timeout(deadline_s):
                    while not self._view.has_decode_worker(refused):
                        await self._view.wait_change()
        except TimeoutError:
            message = f"no decode worker was ready within {deadline_s:g} s"
            raise NoWorkers(message, retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self.num_pending -= 1
