"""Writes a worker's record to Redis and reads those of other workers, every `record_interval_s`.

Without Redis the worker continues to serve, and the record is written when Redis is back.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from tandem.common.config.cluster import ClusterConfig, Role
from tandem.common.process.cancellation import cancel
from tandem.common.process.ticks import sleep_until_tick
from tandem.net.store.client import UNREACHABLE, Client
from tandem.net.store.registry import KvCompatibility, Registry, WorkerRecord

log = logging.getLogger(__name__)


class Registration:
    """The registration of one worker. The caller closes `redis`."""

    def __init__(
        self,
        redis: Client,
        cluster: ClusterConfig,
        *,
        record: Callable[[], WorkerRecord],
        on_records: Callable[[list[WorkerRecord]], None],
        loan: Callable[[], str] = lambda: "",
    ) -> None:
        """`record` makes the current record, and `on_records` gets those of all workers of its
        group. `loan` returns the role in which the next process of this worker starts; "": the
        configured one."""
        self._cluster = cluster
        self._record = record
        self._on_records = on_records
        self._loan = loan
        self._registry = Registry(redis, cluster)
        self._task: asyncio.Task[None] | None = None
        self._reachable = True
        self._num_writes = 0

    async def join(self, compatibility: KvCompatibility) -> Role | None:
        """Waits for Redis and checks the worker. Returns the role that the previous process of this
        worker had as a lent worker, or None.

        Raises Incompatible if the cluster's workers have a different KV compatibility; the error
        names the differences.
        """
        record = self._record()
        while True:
            try:
                await self._registry.check_compatibility(compatibility, record.generation)
                return await self._registry.read_loan(record.worker_id)
            except UNREACHABLE as error:
                self.note_unreachable(error)
                await asyncio.sleep(self._cluster.record_interval_s)

    async def start(self) -> None:
        """Writes the record now, and then at each interval until `leave`."""
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def refresh(self) -> None:
        """Writes this worker's record and reads those of other workers, once."""
        try:
            self._num_writes += 1
            record = msgspec.structs.replace(self._record(), num_writes=self._num_writes)
            known = await self._registry.write(record, self._loan())
            self._on_records([each for each in known if each.group == record.group])
            if not self._reachable:
                log.info("Redis answers again")
            self._reachable = True
        except UNREACHABLE as error:
            self.note_unreachable(error)

    async def stop(self) -> None:
        """Ends the writes of the record, which otherwise would be written again after `remove`."""
        if self._task is not None:
            await cancel(self._task)

    async def remove(self) -> None:
        """Removes the record. Errors of redis-py propagate."""
        await self._registry.remove(self._record().worker_id)

    def note_unreachable(self, error: Any) -> None:
        if self._reachable:
            log.warning("Redis does not answer (%s); serving goes on without it", error)
        self._reachable = False

    async def _refresh_for_ever(self) -> None:
        while True:
            await sleep_until_tick(self._cluster.record_interval_s)
            try:
                await self.refresh()
            # Continue after any error, because a worker without a record counts as gone.
            except Exception:
                log.exception(
                    "refreshing the record of this worker in Redis failed; the next try is in %g s",
                    self._cluster.record_interval_s,
                )
