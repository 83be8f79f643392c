"""The fronts of decode workers: how one makes itself known, and how an endpoint picker knows all.

    front   --each second, while it can serve requests--> Redis --twice a second--> picker

While Redis is lost a picker goes on with the fronts that it knew last.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tandem.net.store.client import UNREACHABLE
from tandem.net.store.fronts import WRITTEN_S, Fronts
from tandem.router.workers.cluster_view import POLL_INTERVAL_S, ClusterView

log = logging.getLogger(__name__)


class FrontTable:
    """Endpoints of the decode workers' fronts, by worker id; `run` keeps them true."""

    def __init__(self, fronts: Fronts, view: ClusterView) -> None:
        self.endpoints: dict[str, str] = {}
        self._fronts = fronts
        self._view = view

    async def run(self) -> None:
        """Reads the fronts until it is cancelled."""
        while True:
            ids = [w.worker_id for w in self._view.snapshots() if w.role == "decode"]
            try:
                found = await self._fronts.read(ids)
            except UNREACHABLE as error:
                log.debug("fronts cannot be read, the last known ones stay: %r", error)
            else:
                before = self.endpoints
                self.endpoints = found
                if found != before:
                    log.info("fronts: %s", found or "none")
                    self._view.notify_change()
            await asyncio.sleep(POLL_INTERVAL_S)


async def announce(
    fronts: Fronts, worker_id: str, endpoint: str, is_ready: Callable[[], bool]
) -> None:
    """Makes a front known while it is ready, until it is cancelled; then takes it away."""
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
