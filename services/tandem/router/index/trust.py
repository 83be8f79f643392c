"""An alarm ends the trust in a worker's entries in the prefix tree until it has published anew.

    believed --alarm--> forgotten in the tree: no router matches its entries any more
                            `--its publisher's next heartbeat finds that, and publishes everything
                               again under a new epoch--> believed

So there is no list of distrusted workers to keep or to share: the tree has nothing of one that does
not publish. Alarms: `hits` (what was predicted to be cached was not, see `hit_watch`), `audit` (its
entries are not what it holds), `silent` (its log stands still though the worker is alive).
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
# After an alarm a worker has so long to publish everything; then it may be alarmed about again.
RENEWAL_S = 20.0
WINDOW_TOKENS = 8192  # predicted ones; so many lately count
EVIDENCE_TOKENS = 1024  # predicted ones; with fewer nothing is said
REQUESTS_MIN = 4
HIT_RATIO_MIN = 0.5  # under it the promise is broken: eviction under pressure costs far less


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
        """Logs, counts, and has the tree forget the entries of a worker, or of a tier of it, until
        they are new."""
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
        # Blocks that others needed in a burst are missing, too, though no entry was ever wrong.
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
            self._alarmed_at.pop(holder, None)  # a worker that left may be forgotten already
            log.warning("%s is not forgotten in the prefix tree yet: %r", holder, error)


@dataclass(slots=True)
class _Window:
    requests: deque[tuple[int, int]] = field(default_factory=deque)  # tokens: predicted, cached
    predicted: int = 0
    cached: int = 0


class HitWatch:
    """Checks whether what a worker's entries in the prefix tree promise comes true. Pure.

    For each worker a window of its last requests: the tokens that were predicted to be cached there
    when a request was placed, and those that were. Reuse at someone else may hide that a worker has
    nothing, so a low ratio is never an accident of who was asked, only of what was promised.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def observe(self, worker_id: str, predicted: int, cached: int) -> float | None:
        """Takes in a request; returns the hit ratio if it is too low to trust the worker's entries.

        `cached`: at least so many tokens were reused there. The window begins anew after an answer.
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
        """Forgets all other workers."""
        for worker_id in self._windows.keys() - set(worker_ids):
            del self._windows[worker_id]
