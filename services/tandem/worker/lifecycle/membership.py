"""A worker's registration: its record, KV compatibility, peers, and entries in the prefix tree.

The worker has all this data itself, and Redis has a copy. Without Redis the worker continues to
serve and retries. When Redis is back, the worker publishes everything again.
"""

import asyncio
from collections.abc import Callable, Iterable

from tandem.common.config.cluster import ClusterConfig
from tandem.engine.types import StepReport
from tandem.net.store.client import UNREACHABLE, connect
from tandem.net.store.registry import KvCompatibility, WorkerRecord
from tandem.prefix_index.holders import holder_of
from tandem.prefix_index.publisher import Publisher
from tandem.prefix_index.redis import RedisIndex
from tandem.worker.lifecycle.registration import Registration
from tandem.worker.lifecycle.role import RoleChange


class Membership:
    """Keeps this worker's record and its entries in the prefix tree."""

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
        self._worker_id = worker_id
        self._role = role
        self._redis = connect(cluster.redis_url)
        self._registration = Registration(
            self._redis, cluster, record=record, on_records=on_records, loan=lambda: role.loan
        )
        self._index = RedisIndex(self._redis, cluster.cluster_id)
        self.publisher = Publisher(self._index, worker_id, epoch)
        self._of_tiers = {
            name: Publisher(self._index, holder_of(worker_id, name), epoch) for name in tiers
        }

    async def join(self, compatibility: KvCompatibility) -> None:
        """Waits for Redis, then registers the worker.

        If the previous process of this worker crashed while it was lent to the other pool
        (role.py), this process joins that pool. Raises Incompatible if the cluster's workers have a
        different KV compatibility; the error names the differences.
        """
        loan = await self._registration.join(compatibility)
        for publisher in self._publishers:
            publisher.start()
        if loan is not None:
            await self._role.to(loan)
        await self._registration.start()

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
        await self._registration.refresh()

    async def leave(self) -> None:
        """Removes the worker from placement and from the prefix tree."""
        await self._registration.stop()
        try:
            await asyncio.gather(*(publisher.aclose() for publisher in self._publishers))
            await self._registration.remove()
            await self._index.forget(self._worker_id)
        except UNREACHABLE as error:
            self._registration.note_unreachable(error)
        await self._redis.aclose()
