"""Checks that the prefix tree in Redis names the blocks that the workers really hold.

Every `INTERVAL_S` seconds, the audit compares up to `SAMPLE` of one worker's entries in the tree
with the blocks that this worker holds. The workers take turns. A comparison takes about a
millisecond of Redis's time. If several comparisons, which are enough for twice as many entries as a
worker has blocks, find no difference, and neither the tree nor the worker's blocks change
meanwhile, the next one of the worker is made after `UNCHANGED_S` seconds. Operators can also
compare all workers at once (`verify`).
Two findings raise an alarm (`trust.py`):
- An entry and the worker's blocks differ in three comparisons in a row.
- A worker is alive, but has published nothing to the prefix tree for `SILENT_S` seconds.
"""

import asyncio
import logging
import time

import grpc.aio

from tandem.common.process.ticks import sleep_until_tick
from tandem.errors import QueueFull
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.net.store.client import UNREACHABLE
from tandem.prefix_index.audit import CALL_ENTRIES, Differences, TreeInspector
from tandem.prefix_index.entries import split_entries
from tandem.prefix_index.holders import holder_of
from tandem.router.index.metrics import IndexMetrics
from tandem.router.index.trust import IndexTrust
from tandem.router.workers.cluster_view import ClusterView
from tandem.router.workers.known_worker import KnownWorker

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
UNCHANGED_S = 300.0
SAMPLE = CALL_ENTRIES
# A worker usually publishes to the prefix tree once a second. After this many seconds without a
# publication, the worker's entries may be wrong.
SILENT_S = 10
_ROUNDS_SILENT_MAX = 2
_ANSWER_DEADLINE_S = 30.0
_WORKERS_AT_ONCE = 4


class IndexAudit:
    """Audits the prefix tree: `run` at intervals, and `verify` when an operator requests it."""

    def __init__(
        self, view: ClusterView, tree: TreeInspector, trust: IndexTrust, metrics: IndexMetrics
    ) -> None:
        self._view = view
        self._tree = tree
        self._trust = trust
        self._metrics = metrics
        self._audited_last = ""
        self._rounds_silent: dict[str, int] = {}
        # worker id -> (what the comparisons depend on, number of comparisons without a difference
        # since it changed, monotonic seconds of the last one)
        self._clean: dict[str, tuple[object, int, float]] = {}
        self._verifying = False

    async def run(self) -> None:
        while True:
            await sleep_until_tick(INTERVAL_S)
            try:
                await self._round()
            except UNREACHABLE as error:
                log.debug(
                    "the prefix tree cannot be audited, because Redis does not answer: %r", error
                )
            except Exception:
                log.exception(
                    "an audit of the prefix tree failed; the next one is in %g s", INTERVAL_S
                )

    async def verify(self, *, everything: bool) -> dict[str, Differences]:
        """Compares a sample of each worker's entries (or all entries) with the worker's blocks.

        Returns worker id -> differences. If entries of a worker differ, the worker must publish all
        its blocks again. Raises QueueFull if another verification runs.
        """
        if self._verifying:
            raise QueueFull(
                "another verification of the prefix tree is still running; try again later",
                retry_after_s=1.0,
            )
        self._verifying = True
        turns = asyncio.Semaphore(_WORKERS_AT_ONCE)

        async def one(worker: KnownWorker) -> Differences:
            async with turns:
                return await self._compare(worker, None if everything else SAMPLE)

        try:
            workers = {w.record.worker_id: w for w in self._view.known() if w.record.has_kv}
            found = await asyncio.gather(*map(one, workers.values()))
            return dict(zip(workers, found, strict=True))
        finally:
            self._verifying = False

    async def _round(self) -> None:
        self._metrics.stats = stats = await self._tree.stats()
        known = self._view.known()
        workers = [w for w in known if w.record.has_kv and w.record.state == "ready"]
        self._look_for_silence(workers)
        if not workers or self._view.redis_state != "ok":
            return
        ids = sorted(w.record.worker_id for w in workers)
        self._audited_last = next((i for i in ids if i > self._audited_last), ids[0])
        worker = next(w for w in workers if w.record.worker_id == self._audited_last)
        record = worker.record
        state = (record.epoch, record.counts, record.load.blocks_cached, stats.position)
        now = time.monotonic()
        for gone in self._clean.keys() - set(ids):
            del self._clean[gone]
        before, num_clean, compared_at = self._clean.get(record.worker_id, (state, 0, 0.0))
        if before != state:
            num_clean = 0
        num_enough = 1 + 2 * record.load.blocks_cached // SAMPLE
        if num_clean >= num_enough and now < compared_at + UNCHANGED_S:
            return
        found = await self._compare(worker, SAMPLE)
        if found.any or found.error:
            self._clean.pop(record.worker_id, None)
        else:
            self._clean[record.worker_id] = state, num_clean + 1, now

    def _look_for_silence(self, workers: list[KnownWorker]) -> None:
        assert self._metrics.stats is not None
        logs = self._metrics.stats.workers
        silent = {}
        for holder in (holder_of(w.record.worker_id, t) for w in workers for t in _tiers_of(w)):
            log_of_worker = logs.get(holder)
            if log_of_worker is not None and log_of_worker.silent_s <= SILENT_S:
                continue
            # Only silence in three rounds in a row raises an alarm. A worker that was cut off from
            # Redis may look silent for one round: it counts as alive before it publishes again.
            silent[holder] = self._rounds_silent.get(holder, 0) + 1
            if silent[holder] > _ROUNDS_SILENT_MAX:
                what = "its publications are missing in the prefix tree"
                if log_of_worker is not None:
                    silent_s = log_of_worker.silent_s
                    what = f"it has published nothing to the prefix tree for {silent_s} s"
                self._trust.alarm(holder, "silent", what)
        self._rounds_silent = silent

    async def _compare(self, worker: KnownWorker, sample: int | None) -> Differences:
        """Compares the entries of the worker's block pool and of each tier of the worker."""
        found = Differences()
        for tier in _tiers_of(worker):
            found += await self._compare_holder(worker, tier, sample)
        return found

    async def _compare_holder(
        self, worker: KnownWorker, tier: str, sample: int | None
    ) -> Differences:
        """Compares the prefix tree's entries of one tier of a worker with the blocks in that tier.

        The tier "" is the block pool. A difference raises an alarm.
        """
        holder = holder_of(worker.record.worker_id, tier)
        address = worker.record.address
        async with self._view.calls.open(address) as channel:
            stub = WorkerStub(channel)  # type: ignore[no-untyped-call]

            async def held(first: int, end: int) -> set[bytes]:
                reply = await stub.ListBlocks(
                    pb.ListBlocksRequest(first_bucket=first, end_bucket=end, tier=tier),
                    timeout=_ANSWER_DEADLINE_S,
                    metadata=self._view.calls.metadata,
                )
                return split_entries(reply.hashes)

            try:
                found = await self._tree.audit(holder, held, sample=sample)
            except grpc.aio.AioRpcError as error:
                message = f"it does not answer: {error.code().name}: {error.details()}"
                return Differences(error=message)
            except UNREACHABLE as error:
                return Differences(error=f"Redis does not answer: {error!r}")
        num_same = found.num_checked - found.missing - found.stale
        counts = {"missing": found.missing, "stale": found.stale, "same": num_same}
        for outcome, count in counts.items():
            self._metrics.audited.labels(outcome=outcome).inc(count)
        if found.in_tree and found.any:
            what = (
                f"of {found.num_checked} compared entries, {found.missing} are missing in the "
                f"prefix tree and {found.stale} are stale"
            )
            self._trust.alarm(holder, "audit", what)
        return found


def _tiers_of(worker: KnownWorker) -> tuple[str, ...]:
    """Returns the names of the worker's tiers, and "" for its block pool."""
    return "", *(tier.name for tier in worker.record.rates.tiers)
