"""Metrics about this router's look-ups in the prefix tree, the tree's size, audits and alarms."""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.net.observability.metrics import MetricSet, counter, gauges, histogram
from tandem.net.store.registry import KvCompatibility
from tandem.prefix_index.audit import TreeStats
from tandem.prefix_index.holders import with_shared_tiers
from tandem.prefix_index.redis import RedisIndex
from tandem.prefix_index.replicated import ReplicatedIndex

_LOOKUP_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
_DELAY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5, 30)


class IndexMetrics(MetricSet, Collector):
    """Counters of look-ups and audits, and gauges of the prefix tree's last statistics."""

    lookups = counter(
        "tandem_prefix_lookups",
        "Look-ups in the prefix tree: hit (a worker has some of the blocks), miss or failed",
        "outcome",
    )
    lookup_s = histogram(
        "tandem_prefix_lookup_seconds",
        "Duration of the look-ups in the prefix tree that were answered, in seconds",
        _LOOKUP_S,
    )
    predicted = counter(
        "tandem_prefix_tokens_predicted",
        "Tokens that the prefix tree predicted to be cached at the chosen workers",
    )
    found = counter(
        "tandem_prefix_tokens_found",
        "Predicted tokens that really were cached at the chosen workers",
    )
    replica_delay_s = histogram(
        "tandem_prefix_replica_delay_seconds",
        "Time from a change of the prefix tree in Redis to the same change of this router's "
        "replica, in seconds",
        _DELAY_S,
    )
    alarms = counter(
        "tandem_prefix_index_alarms",
        "Alarms about a worker's entries in the prefix tree: hits, audit or silent",
        "worker",
        "kind",
    )
    audited = counter(
        "tandem_prefix_index_audited_entries",
        "Audited entries of the prefix tree: same, missing in the tree, or stale in the tree",
        "outcome",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.stats: TreeStats | None = None  # last statistics of the prefix tree
        self.index: ReplicatedIndex | None = None
        for outcome in ("hit", "miss", "failed"):
            self.lookups.labels(outcome=outcome)
        for outcome in ("same", "missing", "stale"):
            self.audited.labels(outcome=outcome)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        if self.index is not None:
            yield from _of_replica(self.index)
        if self.stats is not None:
            yield from _of_tree(self.stats)


def _of_tree(stats: TreeStats) -> Iterator[Metric]:
    for name, text, value in (
        ("entries", "Blocks in the prefix tree", stats.num_entries),
        (
            "bytes",
            "Memory of Redis that the prefix tree's blocks take, in bytes, estimated from a sample",
            stats.num_bytes,
        ),
    ):
        yield GaugeMetricFamily(f"tandem_prefix_index_{name}", text, value=value)
    yield CounterMetricFamily(
        "tandem_prefix_index_swept",
        "Entries of the prefix tree that were cleared because their worker was dropped",
        value=stats.num_swept,
    )
    workers = sorted(stats.workers.items())
    yield gauges(
        "tandem_prefix_index_worker_blocks",
        "Blocks of each worker in the prefix tree",
        ["worker"],
        [((name,), worker.num_blocks) for name, worker in workers],
    )
    yield gauges(
        "tandem_prefix_index_worker_silent_seconds",
        "Seconds since the worker last published; a healthy worker publishes every second",
        ["worker"],
        [((name,), worker.silent_s) for name, worker in workers],
    )


def _of_replica(index: ReplicatedIndex) -> Iterator[Metric]:
    replica = index.replica
    for name, text, value in (
        ("entries", "Blocks in this router's replica of the prefix tree", replica.num_entries),
        ("bytes", "Memory of the replica, in bytes", replica.num_bytes),
        (
            "silent_seconds",
            "Seconds since Redis last answered the replica, usually at most 1",
            replica.silent_s,
        ),
    ):
        yield GaugeMetricFamily(f"tandem_prefix_replica_{name}", text, value=value)
    yield CounterMetricFamily(
        "tandem_prefix_replica_loads",
        "Times that the replica of a shard, or of some of its workers, was loaded from Redis",
        value=replica.num_loads,
    )
    lookups = CounterMetricFamily(
        "tandem_prefix_replica_lookups",
        "Look-ups by source: replica, or redis while the replica cannot be used",
        labels=["source"],
    )
    lookups.add_metric(["replica"], index.num_local)
    lookups.add_metric(["redis"], index.num_asked)
    yield lookups


async def counted_match(
    index: RedisIndex,
    metrics: IndexMetrics,
    compatibility: Callable[[], KvCompatibility | None],
    block_hashes: Sequence[bytes],
) -> dict[str, int]:
    """Looks up a prompt's blocks in the prefix tree, and counts the look-up in the metrics.

    Returns id of a worker or tier -> number of the prompt's leading blocks held there.
    `compatibility` returns the KV compatibility for which `block_hashes` were computed.
    """
    began = time.perf_counter()
    outcome = "failed"
    try:
        known = compatibility()
        closed = known is None or not known.has_windows
        found = await index.match(block_hashes, closed=closed)
        outcome = "hit" if found else "miss"
        metrics.lookup_s.observe(time.perf_counter() - began)
        return with_shared_tiers(found)
    finally:
        metrics.lookups.labels(outcome=outcome).inc()
