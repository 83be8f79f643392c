"""Registration of fronts in Redis, and the endpoint picker's table of fronts.

A front is a router that runs beside one decode worker. An inference gateway sends each request to
the front that the endpoint picker names. A front that can serve requests writes its endpoint
(HOST:PORT) to Redis every WRITTEN_S seconds. The picker reads the endpoints of all fronts every
POLL_INTERVAL_S seconds. While Redis is unreachable, the picker uses the endpoints that it read
last.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.net.store.client import UNREACHABLE
from tandem.net.store.fronts import WRITTEN_S, Fronts
from tandem.router.workers.cluster_view import POLL_INTERVAL_S, ClusterView

log = logging.getLogger(__name__)


class FrontTable:
    """The endpoint picker's table: decode worker id -> endpoint of the worker's front. `run` keeps
    the table up to date."""

    def __init__(self, fronts: Fronts, views: Sequence[ClusterView]) -> None:
        self.endpoints: dict[str, str] = {}
        self._fronts = fronts
        self._views = views

    async def run(self) -> None:
        """Reads the endpoints of all fronts every POLL_INTERVAL_S, until the task is cancelled."""
        while True:
            workers = [w for view in self._views for w in view.snapshots()]
            ids = [w.worker_id for w in workers if w.role == "decode"]
            try:
                found = await self._fronts.read(ids)
            except UNREACHABLE as error:
                log.debug(
                    "the routers in front of decode workers (--front-of) cannot be read from "
                    "Redis, so the last known ones are used: %r",
                    error,
                )
            else:
                before = self.endpoints
                self.endpoints = found
                if found != before:
                    log.info(
                        "the routers in front of decode workers (--front-of) are now: %s",
                        found or "none",
                    )
                    for view in self._views:
                        view.notify_change()
            await asyncio.sleep(POLL_INTERVAL_S)


async def announce(
    fronts: Fronts, worker_id: str, endpoint: str, is_ready: Callable[[], bool]
) -> None:
    """Registers a front in Redis while `is_ready` returns True. Removes the front when this task is
    cancelled."""
    try:
        while True:
            with suppress(*UNREACHABLE):
                if is_ready():
                    await fronts.announce(worker_id, endpoint)
                else:
                    await fronts.remove(worker_id)
            await asyncio.sleep(WRITTEN_S)
    finally:
        with suppress(*UNREACHABLE):
            await fronts.remove(worker_id)
