"""A worker's registration: its record, KV compatibility, peers, and entries in the prefix tree.

The worker has all this data itself, and Redis has a copy. Without Redis the worker continues to
serve and retries. When Redis is back, the worker publishes everything again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tandem.common.config.cluster import ClusterConfig
from tandem.common.process.cancellation import cancel
from tandem.engine.types import StepReport
from tandem.net.store.client import UNREACHABLE, connect
from tandem.net.store.registry import KvCompatibility, Registry, WorkerRecord
from tandem.prefix_index.holders import holder_of
from tandem.prefix_index.publisher import Publisher
from tandem.prefix_index.redis import RedisIndex
from tandem.worker.lifecycle.role import RoleChange

log = logging.getLogger(__name__)


class Membership:
    """Writes this worker's record and reads those of other workers, every `record_interval_s`."""

    def __init__(
        self,
        cluster: ClusterConfig,
        *,
        worker_id: str,
        epoch: str,
        role: RoleChange,
        tiers: Iterable[str],
        record: Callable[[], WorkerRecord],
        on_records: Callable[[list[WorkerRecord]], None],
    ) -> None:
        """`tiers` are the names of the tiers below the KV pool."""
        self._cluster = cluster
        self._worker_id = worker_id
        self._role = role
        self._record = record
        self._on_records = on_records
        self._redis = connect(cluster.redis_url)
        self._registry = Registry(self._redis, cluster)
        self._index = RedisIndex(self._redis, cluster.cluster_id)
        self.publisher = Publisher(self._index, worker_id, epoch)
        self._of_tiers = {
            name: Publisher(self._index, holder_of(worker_id, name), epoch) for name in tiers
        }
        self._task: asyncio.Task[None] | None = None
        self._reachable = True
        self._num_writes = 0

    async def join(self, compatibility: KvCompatibility) -> None:
        """Waits for Redis, then registers the worker.

        If the previous process of this worker crashed while it was lent to the other pool
        (role.py), this process joins that pool. Raises Incompatible if the cluster's workers have a
        different KV compatibility; the error names the differences.
        """
        while True:
            try:
                await self._registry.check_compatibility(compatibility, self._record().generation)
                loan = await self._registry.read_loan(self._worker_id)
                break
            except UNREACHABLE as error:
                self._note_unreachable(error)
                await asyncio.sleep(self._cluster.record_interval_s)
        for publisher in self._publishers:
            publisher.start()
        if loan is not None:
            await self._role.to(loan)
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_for_ever())

    def on_report(self, report: StepReport) -> None:
        """Queues the blocks that the step stored and removed for publication in the prefix tree."""
        if report.stored or report.removed:
            self.publisher.add((s.block_hash for s in report.stored), report.removed)
        for tier in report.tiers:
            self._of_tiers[tier.tier].add((s.block_hash for s in tier.stored), tier.removed)

    @property
    def _publishers(self) -> list[Publisher]:
        return [self.publisher, *self._of_tiers.values()]

    async def refresh(self) -> None:
        """Writes this worker's record and reads those of other workers, once."""
        try:
            self._num_writes += 1
            record = msgspec.structs.replace(self._record(), num_writes=self._num_writes)
            await self._registry.write(record, self._role.loan)
            self._on_records(await self._registry.read())
            if not self._reachable:
                log.info("Redis answers again")
            self._reachable = True
        except UNREACHABLE as error:
            self._note_unreachable(error)

    async def leave(self) -> None:
        """Removes the worker from placement and from the prefix tree."""
        if self._task is not None:
            await cancel(self._task)  # otherwise this task would write the record again
        try:
            await asyncio.gather(*(publisher.aclose() for publisher in self._publishers))
            await self._registry.remove(self._worker_id)
            await self._index.forget(self._worker_id)
        except UNREACHABLE as error:
            self._note_unreachable(error)
        await self._redis.aclose()

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._cluster.record_interval_s)
            try:
                await self.refresh()
            # Continue after any error, because a worker without a record counts as gone.
            except Exception:
                log.exception(
                    "refreshing the record of this worker in Redis failed; the next try is in %g s",
                    self._cluster.record_interval_s,
                )

    def _note_unreachable(self, error: Any) -> None:
        if self._reachable:
            log.warning("Redis does not answer (%s); serving goes on without it", error)
        self._reachable = False
