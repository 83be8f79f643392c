"""Removes a worker's entries from the prefix tree if they seem to be wrong.

1. An alarm is raised for a worker (table below).
2. All entries of the worker are removed from the tree, so no router relies on them.
3. The worker sees at its next heartbeat that its entries are gone, and publishes all its blocks
   again, under a new epoch.
So routers need not keep or share a list of distrusted workers.

Alarm    Cause
hits     less than half as many prompt tokens were cached as the tree predicts (`HitWatch`)
audit    the worker's entries in the tree differ from the blocks that the worker holds (`audit.py`)
silent   the worker is alive, but has published nothing for some time (`audit.py`)
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from tandem.net.store.client import REPLY_TIMEOUT_S, UNREACHABLE
from tandem.prefix_index.holders import worker_of
from tandem.prefix_index.redis import RedisIndex
from tandem.router.index.metrics import IndexMetrics
from tandem.router.request.job import Job
from tandem.router.workers.cluster_view import ClusterView

log = logging.getLogger(__name__)

Alarm = Literal["hits", "audit", "silent"]
# After an alarm, no other alarm of the worker is raised for this many seconds. In this time the
# worker publishes all its blocks again.
RENEWAL_S = 20.0
# `HitWatch` keeps a worker's latest requests with about this many predicted cached tokens in total.
WINDOW_TOKENS = 8192
# No alarm is raised while a worker's latest requests have fewer predicted cached tokens in total.
EVIDENCE_TOKENS = 1024
REQUESTS_MIN = 4
HIT_RATIO_MIN = 0.5  # an alarm is raised if cached tokens / predicted cached tokens is lower


class IndexTrust:
    def __init__(self, view: ClusterView, index: RedisIndex, metrics: IndexMetrics) -> None:
        self._view = view
        self._index = index
        self._metrics = metrics
        self._watch = HitWatch()
        # id of a worker or tier -> time of the last alarm, in seconds on the monotonic clock
        self._alarmed_at: dict[str, float] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    def observe(self, job: Job) -> None:
        """Compares an ended request's predicted number of cached tokens with the real number."""
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
                what = (
                    f"only {ratio:.0%} of the tokens that the prefix tree predicts for it are "
                    "cached"
                )
                self.alarm(worker_id, "hits", what)

    def alarm(self, holder: str, kind: Alarm, what: str) -> None:
        """Logs and counts an alarm, and removes the entries of a worker or tier from the tree."""
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
        # An alarm of kind `hits` is only a warning, because a burst of requests may have evicted
        # blocks although no entry was wrong.
        level = logging.WARNING if kind == "hits" else logging.ERROR
        log.log(level, "%s: %s; it must publish all its KV blocks again", holder, what)
        text = f"{what}; it publishes all its KV blocks again"
        self._view.events.add("prefix tree", holder, text, once=f"{holder}:{int(time.time())}")
        task = asyncio.create_task(self._forget(holder))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, holder: str) -> None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._index.forget(holder)
        except UNREACHABLE as error:
            # The entries were not removed, so another alarm must be possible at once.
            self._alarmed_at.pop(holder, None)
            log.warning(
                "the entries of %s cannot be removed from the prefix tree, because Redis does not "
                "answer: %r",
                holder,
                error,
            )


@dataclass(slots=True)
class _Window:
    # (number of prompt tokens predicted to be cached, number really cached) of each request
    requests: deque[tuple[int, int]] = field(default_factory=deque)
    predicted: int = 0
    cached: int = 0


class HitWatch:
    """Detects workers that have fewer cached tokens than the prefix tree predicts. Does no I/O.

    For the recent requests of each worker, the class sums the number of prompt tokens that were
    predicted to be cached, and the number that were cached. Example: 2,000 tokens were predicted,
    900 were cached, so the hit ratio is 0.45. Tokens that were pulled from another worker count as
    cached.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def observe(self, worker_id: str, predicted: int, cached: int) -> float | None:
        """Adds a request. Returns the hit ratio if it is too low to trust the worker's entries.

        Otherwise returns None. `predicted` and `cached` are the request's numbers of prompt tokens.
        When a ratio is returned, the worker's recent requests are forgotten.
        """
        if predicted <= 0:
            return None
        cached = min(cached, predicted)
        window = self._windows.setdefault(worker_id, _Window())
        requests = window.requests
        requests.append((predicted, cached))
        window.predicted += predicted
        window.cached += cached
        while len(requests) > REQUESTS_MIN and window.predicted - requests[0][0] >= WINDOW_TOKENS:
            oldest_predicted, oldest_cached = requests.popleft()
            window.predicted -= oldest_predicted
            window.cached -= oldest_cached
        ratio = window.cached / window.predicted
        enough = len(requests) >= REQUESTS_MIN and window.predicted >= EVIDENCE_TOKENS
        if not enough or ratio >= HIT_RATIO_MIN:
            return None
        del self._windows[worker_id]
        return ratio

    def forget(self, worker_id: str) -> None:
        self._windows.pop(worker_id, None)

    def keep(self, worker_ids: Collection[str]) -> None:
        """Forgets the recent requests of all workers that are not in `worker_ids`."""
        for worker_id in self._windows.keys() - set(worker_ids):
            del self._windows[worker_id]
