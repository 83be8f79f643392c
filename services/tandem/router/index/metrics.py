"""Metrics of the prefix tree, as this router sees it, and the look-up that counts itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.prefix_index.inspect import TreeStats

_LOOKUP_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class IndexMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.stats: TreeStats | None = None  # as last read
        self._lookups = Counter(
            "tandem:prefix_lookups",
            "Look-ups in the prefix tree: hit (some worker has a part), miss, failed",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("hit", "miss", "failed"):
            self._lookups.labels(outcome=outcome)
        self._lookup_s = Histogram(
            "tandem:prefix_lookup_seconds",
            "Of a look-up that was answered",
            registry=registry,
            buckets=_LOOKUP_S,
        )
        self._predicted = Counter(
            "tandem:prefix_tokens_predicted",
            "Tokens predicted to be cached at the workers that were used",
            registry=registry,
        )
        self._found = Counter(
            "tandem:prefix_tokens_found", "Of those, the ones that were", registry=registry
        )
        self.alarms = Counter(
            "tandem:prefix_index_alarms",
            "Workers whose entries were not believed any more: hits, audit or silent",
            ["worker", "kind"],
            registry=registry,
        )
        self.audited = Counter(
            "tandem:prefix_index_audited_entries",
            "Entries compared with what workers hold: same, missing in the tree, stale in it",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("same", "missing", "stale"):
            self.audited.labels(outcome=outcome)
        registry.register(_TreeGauges(self))

    def on_lookup(self, outcome: str, seconds: float) -> None:
        self._lookups.labels(outcome=outcome).inc()
        if outcome != "failed":
            self._lookup_s.observe(seconds)

    def on_prediction(self, predicted: int, found: int) -> None:
        self._predicted.inc(predicted)
        self._found.inc(found)


class Matches(Protocol):
    async def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]: ...


class CountedLookup:
    """The tree's `match`, counted."""

    def __init__(self, index: Matches, metrics: IndexMetrics) -> None:
        self._index = index
        self._metrics = metrics

    async def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        began = time.perf_counter()
        outcome = "failed"
        try:
            found = await self._index.match(block_hashes)
            outcome = "hit" if found else "miss"
            return found
        finally:
            self._metrics.on_lookup(outcome, time.perf_counter() - began)


class _TreeGauges(Collector):
    def __init__(self, metrics: IndexMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        if stats is None:
            return
        yield GaugeMetricFamily(
            "tandem:prefix_index_entries", "Blocks in the tree", value=stats.num_entries
        )
        yield GaugeMetricFamily(
            "tandem:prefix_index_bytes",
            "Memory of Redis that they take, by a sample",
            value=stats.num_bytes,
        )
        yield CounterMetricFamily(
            "tandem:prefix_index_swept",
            "Entries that lost the bit of a worker that was dropped",
            value=stats.num_swept,
        )
        blocks = GaugeMetricFamily(
            "tandem:prefix_index_worker_blocks", "A worker's blocks in the tree", labels=["worker"]
        )
        silent = GaugeMetricFamily(
            "tandem:prefix_index_worker_silent_seconds",
            "Since a worker's log last moved; a healthy one moves each second",
            labels=["worker"],
        )
        for worker_id, worker in sorted(stats.workers.items()):
            blocks.add_metric([worker_id], worker.num_blocks)
            silent.add_metric([worker_id], worker.silent_s)
        yield from (blocks, silent)
