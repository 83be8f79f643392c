"""Ends the trust in a worker's entries in the prefix tree after an alarm.

    trusted --alarm--> forgotten in the tree: no router matches its entries any more
                            `--its publisher's next heartbeat detects that, and publishes all
                               blocks again under a new epoch--> trusted
So no list of distrusted workers must be kept or shared: the tree has no entries of a worker that
does not publish. Alarms: `hits` (predicted tokens were not cached, see `hit_watch`), `audit` (its
entries differ from its blocks), `silent` (its log does not change although the worker is alive).
"""

import asyncio
import logging
import time
from typing import Literal

from tandem.net.store.client import REPLY_TIMEOUT_S, UNREACHABLE
from tandem.prefix_index.holders import worker_of
from tandem.prefix_index.redis import RedisIndex
from tandem.router.index.hit_watch import HitWatch
from tandem.router.index.metrics import IndexMetrics
from tandem.router.request.job import Job
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

Alarm = Literal["hits", "audit", "silent"]
# After an alarm a worker has this much time to publish all blocks before the next alarm.
RENEWAL_S = 20.0


class IndexTrust:
    def __init__(self, view: ClusterView, index: RedisIndex, metrics: IndexMetrics) -> None:
        self._view = view
        self._index = index
        self._metrics = metrics
        self._watch = HitWatch()
        self._alarmed_at: dict[str, float] = {}  # monotonic seconds
        self._forgetting: set[asyncio.Task[None]] = set()

    def observe(self, job: Job) -> None:
        """Compares the cached tokens predicted for a request that ended with the actual ones."""
        compatibility = self._view.compatibility()
        routed = job.routing.routed
        cached_tokens = job.progress.cached_tokens
        if compatibility is None or routed is None or job.routing.num_submissions != 1:
            return
        prompt_blocks = (len(job.request.token_ids) - 1) // compatibility.block_size
        used = [routed.placement.decode.worker_id]
        if prefilled_by := job.progress.timings.prefill_worker_id:
            used.append(prefilled_by)
        for worker_id in used:
            predicted_blocks = min(routed.matches.get(worker_id, 0), prompt_blocks)
            predicted = predicted_blocks * compatibility.block_size
            self._metrics.predicted.inc(predicted)
            self._metrics.found.inc(min(cached_tokens, predicted))
            ratio = self._watch.observe(worker_id, predicted, cached_tokens)
            if ratio is not None:
                what = f"{ratio:.0%} of the tokens are cached there that the prefix tree predicts"
                self.alarm(worker_id, "hits", what)

    def alarm(self, holder: str, kind: Alarm, what: str) -> None:
        """Logs and counts an alarm, and makes the tree forget the entries of a worker or tier."""
        now = time.monotonic()
        if now - self._alarmed_at.get(holder, -RENEWAL_S) < RENEWAL_S:
            return
        self._alarmed_at[holder] = now
        known = {worker.record.worker_id for worker in self._view.known()}
        self._watch.forget(holder)
        self._watch.keep(known)
        for gone in [name for name in self._alarmed_at if worker_of(name) not in known]:
            if gone != holder:
                del self._alarmed_at[gone]
        self._metrics.alarms.labels(worker=holder, kind=kind).inc()
        # This is only a warning, because a burst may have evicted blocks although no entry was
        # wrong.
        level = logging.WARNING if kind == "hits" else logging.ERROR
        log.log(level, "%s: %s; it must publish its blocks anew", holder, what)
        text = f"{what}; it publishes its blocks anew"
        self._view.events.add("prefix tree", holder, text, once=f"{holder}:{int(time.time())}")
        task = asyncio.create_task(self._forget(holder))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, holder: str) -> None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._index.forget(holder)
        except UNREACHABLE as error:
            self._alarmed_at.pop(holder, None)  # a worker that left may already be forgotten
            log.warning("%s is not forgotten in the prefix tree yet: %r", holder, error)
