"""Prometheus metrics of one worker, served by its I/O process.

Gauges are read from the newest load when they are scraped; nothing is computed between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.cost_model import PairRate
from tandem.memory import read_memory
from tandem.prefix_index.publisher import Publisher
from tandem.store.registry import Load
from tandem.worker.engine_process.messages import PullsSettled, ReaderRenewed, TransferReply
from tandem.worker.kv_pulls.lease import PullStats
from tandem.worker.metrics.index import IndexMetrics
from tandem.worker.metrics.probes import Probes
from tandem.worker.metrics.requests import RequestMetrics
from tandem.worker.peers.peers import Peer

_HELP = {
    "num_running": "Sequences in the batch",
    "num_waiting": "Sequences in the queue",
    "queue_max": "Sequences that the queue holds",
    "queued_tokens": "Tokens that wait to be prefilled here",
    "blocks_total": "Blocks of the KV pool",
    "blocks_used": "Blocks that a live sequence references",
    "blocks_cached": "Blocks that nobody references and that can be reused",
    "blocks_quarantined": "Blocks that a read may still write",
    "num_leases": "Prefill streams served here",
    "num_pulls": "Requests that are pulling blocks",
    "num_seats": "Sequences that may run or pull at once",
    "chunk_tokens": "Tokens of prefill that a step takes beside those who decode",
    "step": "Turns of the engine's loop",
    "tokens_wasted": "Slots that live sequences hold and do not fill",
}
_PAIRS: tuple[tuple[str, str, Callable[[PairRate], float]], ...] = (
    (
        "tandem_pair_transport",
        "1 for the transport that blocks of `peer` come over",
        lambda rate: 1,
    ),
    (
        "tandem_pair_bytes_per_second",
        "How fast blocks of `peer` come, as measured",
        lambda rate: rate.bytes_per_s,
    ),
    (
        "tandem_pair_latency_seconds",
        "Of the smallest pull from `peer`, as measured",
        lambda rate: rate.latency_s,
    ),
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class WorkerMetrics:
    """Counters are incremented by their owners; `serve` starts the scrape endpoint."""

    def __init__(self, *, worker_id: str, role: str) -> None:
        self.role = role  # it may change: samples get it when they are scraped
        self._labels = {"worker": worker_id}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # of the I/O process
        memory = Gauge(
            "tandem_memory_free_bytes",
            "Memory that is free on the worker's machine or in its container",
            list(self._labels),
            registry=self._registry,
        )
        memory.labels(**self._labels).set_function(lambda: read_memory().free_bytes)
        self.requests = RequestMetrics(self._labels, self._registry)
        self.steps = self._counter("engine_steps", "Steps of the engine that computed something")
        self.step_s = self._histogram("engine_step_seconds", "Of such a step").labels(
            **self._labels
        )
        self.prefill_tokens = self._counter("prefill_tokens", "Tokens computed in prefill")
        self.decode_tokens = self._counter("decode_tokens", "Tokens computed in decode")
        self.preemptions = self._counter("preemptions", "Sequences preempted by recomputation")
        self.local_prefills = self._counter(
            "local_prefills", "Prompts prefilled here though blocks were reserved to be pulled"
        )
        self._prefill_choices = Counter(
            "tandem_prefill_choices",
            "Where a reserved prompt was to be prefilled, at first and after a failure",
            [*self._labels, "choice", "turn"],
            registry=self._registry,
        )
        self.prefill_failures = self._counter(
            "remote_prefill_failures", "Leases that ended before they were released whole"
        )
        self.kv_bytes_served = self._counter(
            "kv_bytes_served", "Bytes of blocks sent to readers over gRPC"
        )
        self._kv_bytes = self._counter("kv_bytes_pulled", "Bytes of blocks pulled", "transport")
        self._kv_blocks = self._counter("kv_blocks_pulled", "Blocks pulled", "transport")
        self._pull_failures = self._counter(
            "pull_failures", "Pulls over NIXL that did not end DONE", "reason"
        )
        self._blocks_fenced = self._counter(
            "blocks_fenced", "Blocks that a pull left while a read could still write them"
        )
        self._renewals = self._counter(
            "reader_renewals", "How often the NIXL reader was made anew to end such reads"
        )
        self._kv_blocks_skipped = self._counter(
            "kv_blocks_skipped", "Blocks of prompts prefilled elsewhere that were here already"
        )
        self.block_mismatches = self._counter(
            "block_mismatches", "Pulled blocks whose checksum is not their source's"
        )
        self._prefix_blocks = self._counter(
            "prefix_blocks_pulled", "Blocks pulled by hash from who had them", "transport"
        )
        self.blocks_warmed = self._counter(
            "blocks_warmed", "Blocks adopted from peers when the worker was new"
        )
        self._transfer = self._histogram(
            "transfer_seconds", "Of a prompt's pulls, hidden behind compute or not", "transport"
        )
        self._exposed = self._histogram(
            "transfer_exposed_seconds",
            "From the first token of a remote prefill to its release",
            "transport",
        )
        self._second_token = self._histogram(
            "second_token_seconds",
            "From the first token to the second, by how the prompt's blocks came",
            "transport",
        )

    def on_transfer(self, reply: TransferReply) -> None:
        match reply:
            case PullsSettled(results):
                for result in results:
                    if not result.done:
                        labels = {**self._labels, "reason": result.reason or "refused"}
                        self._pull_failures.labels(**labels).inc()
                        self._blocks_fenced.inc(result.num_fenced)
            case ReaderRenewed(num_times):
                self._renewals.inc(num_times)

    def on_choice(self, choice: str, turn: str) -> None:
        self._prefill_choices.labels(**self._labels, choice=choice, turn=turn).inc()

    def on_pull(self, peer: Peer, stats: PullStats) -> None:
        labels = {**self._labels, "transport": peer.transport}
        self._kv_bytes.labels(**labels).inc(stats.num_bytes)
        self._kv_blocks.labels(**labels).inc(stats.num_blocks)
        self._kv_blocks_skipped.inc(stats.num_skipped)
        self._transfer.labels(**labels).observe(stats.pull_s)
        self._exposed.labels(**labels).observe(stats.exposed_s)

    def on_prefix_pull(self, peer: Peer, stats: PullStats) -> None:
        labels = {**self._labels, "transport": peer.transport}
        self._prefix_blocks.labels(**labels).inc(stats.num_blocks)

    def on_second_token(self, transport: str, seconds: float) -> None:
        self._second_token.labels(**self._labels, transport=transport).observe(seconds)

    def watch(self, publisher: Publisher) -> None:
        """Its log in the prefix tree, from now on."""
        self._registry.register(IndexMetrics(self._labels, publisher))

    def collect(self) -> Iterable[Metric]:
        """All but the gauges, as they stand."""
        return _WithRole(self._registry, self).collect()

    def serve(
        self,
        host: str,
        port: int,
        load: Callable[[], Load],
        pairs: Callable[[], Mapping[str, PairRate]],
        probes: Probes,
    ) -> int:
        """Starts the endpoint, which answers probes, too; returns its port."""
        self._registry.register(_Gauges(self._labels, load, pairs))
        server, _ = start_http_server(port, addr=host, registry=self._registry)
        scraped: Any = _WithRole(self._registry, self)
        server.set_app(probes.around(make_wsgi_app(scraped)))
        return int(server.server_address[1])

    def _counter(self, name: str, help_text: str, *more_labels: str) -> Counter:
        counter = Counter(
            f"tandem_{name}", help_text, [*self._labels, *more_labels], registry=self._registry
        )
        return counter if more_labels else counter.labels(**self._labels)

    def _histogram(self, name: str, help_text: str, *more_labels: str) -> Histogram:
        return Histogram(
            f"tandem_{name}",
            help_text,
            [*self._labels, *more_labels],
            buckets=_SECONDS,
            registry=self._registry,
        )


class _WithRole:
    """A registry whose samples of the worker have the label `role` as it is now."""

    def __init__(self, registry: Any, metrics: WorkerMetrics) -> None:
        self._registry = registry
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        role = {"role": self._metrics.role}
        for metric in self._registry.collect():
            metric.samples = [
                s._replace(labels={**s.labels, **role}) if "worker" in s.labels else s
                for s in metric.samples
            ]
            yield metric

    def restricted_registry(self, names: Iterable[str]) -> _WithRole:
        return _WithRole(self._registry.restricted_registry(names), self._metrics)


class _Gauges(Collector):
    def __init__(
        self,
        labels: Mapping[str, str],
        load: Callable[[], Load],
        pairs: Callable[[], Mapping[str, PairRate]],
    ) -> None:
        self._labels = labels
        self._load = load
        self._pairs = pairs

    def collect(self) -> Iterable[GaugeMetricFamily]:
        load = self._load()
        for name in load.__struct_fields__:
            family = GaugeMetricFamily(f"tandem_{name}", _HELP[name], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), getattr(load, name))
            yield family
        total = load.blocks_total
        usage = GaugeMetricFamily(
            "tandem_kv_cache_usage_perc",
            "KV blocks that live sequences hold, 0 to 1",
            labels=list(self._labels),
        )
        usage.add_metric(list(self._labels.values()), load.blocks_used / total if total else 0.0)
        yield usage
        pairs = self._pairs()
        for name, text, value in _PAIRS:
            family = GaugeMetricFamily(name, text, labels=[*self._labels, "peer", "transport"])
            for peer, rate in pairs.items():
                family.add_metric([*self._labels.values(), peer, rate.transport], value(rate))
            yield family
