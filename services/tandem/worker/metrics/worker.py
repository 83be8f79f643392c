"""Prometheus metrics of one worker, served by its I/O process.

At each scrape, gauges are computed from the newest load that the engine reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.common.engine_counts import EngineTally
from tandem.common.kv_tiers import SHARED_TIERS
from tandem.common.perf_model.rates import PairRate
from tandem.common.speculation import SpeculationStats
from tandem.common.worker_load import TierUse, WorkerLoad
from tandem.engine.memory import read_memory
from tandem.engine.types import EngineStats, PeerLoadStats, StepReport, TierStats
from tandem.net.bounded_server import BoundedServer
from tandem.net.observability.metrics import MetricSet, counter, gauge, gauges, histogram
from tandem.prefix_index.publisher import Publisher
from tandem.transfer.reads.messages import PullResult, Renewed
from tandem.worker.engine_process.messages import PullsSettled, TransferReply
from tandem.worker.kv_pulls.lease import ConsumerLease, PullStats
from tandem.worker.metrics.probes import Probes
from tandem.worker.metrics.requests import RequestMetrics
from tandem.worker.peers.peer import Peer

_HELP = {
    "num_running": "Sequences in the batch",
    "num_lines": "Lines of batches among the sequences in the batch",
    "num_waiting": "Sequences in the queue",
    "queue_max": "Largest number of sequences in the queue",
    "queued_tokens": "Prompt tokens that wait for prefill here, without lines of batches",
    "blocks_total": "Blocks of the KV pool, or of the pools of all KV groups",
    "blocks_used": "Blocks of the KV pool that a live sequence references",
    "blocks_cached": "Blocks with valid KV that no sequence references",
    "blocks_quarantined": "Blocks that no sequence needs but that a read may still write",
    "num_leases": "Open leases, each a prefill that this worker serves to a decode worker",
    "num_pulls": "Requests that are pulling KV blocks now",
    "num_running_slots": "Largest number of sequences that may decode or pull at once",
    "chunk_tokens": "Prompt tokens that the engine adds to a step with decoding sequences",
    "step": "Turns of the engine's loop since the start of the engine",
    "tokens_wasted": "Token positions that are not filled, in blocks of live sequences",
}
_PAIRS: tuple[tuple[str, str, Callable[[PairRate], float]], ...] = (
    ("transport", "1 for the transport over which KV blocks of `peer` are pulled", lambda rate: 1),
    (
        "bytes_per_second",
        "Measured speed of pulls from `peer`, in bytes per second",
        lambda r: r.bytes_per_s,
    ),
    (
        "latency_seconds",
        "Measured duration of the smallest pull from `peer`, in seconds",
        lambda r: r.latency_s,
    ),
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TIER_GAUGES: tuple[tuple[str, str, Callable[[TierStats], int]], ...] = (
    ("blocks", "Largest number of KV blocks in the tier", lambda tier: tier.blocks_total),
    ("blocks_held", "KV blocks in the tier", lambda tier: tier.blocks_held),
)
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierStats], int]], ...] = (
    ("blocks_written", "Blocks written to the tier", lambda tier: tier.blocks_written),
    ("blocks_loaded", "Blocks loaded from the tier", lambda tier: tier.blocks_loaded),
    (
        "blocks_bad",
        "KV blocks that the tier lost or that could not be read",
        lambda t: t.blocks_bad,
    ),
    ("write_failures", "Writes to the tier that failed", lambda tier: tier.write_failures),
)
DAMAGE_S = 600.0  # seconds for which operators see that blocks of a tier could not be read


class WorkerMetrics(MetricSet):
    """The metrics of one worker. Other components increment the counters; `serve` starts the
    endpoint.
    """

    _memory = gauge(
        "tandem_memory_free_bytes",
        "Free memory of the worker's machine or container, in bytes",
    )
    steps = counter("tandem_engine_steps", "Engine steps that computed at least one token")
    step_s = histogram(
        "tandem_engine_step_seconds",
        "Duration of engine steps that computed at least one token, in seconds",
        _SECONDS,
    )
    prefill_tokens = counter("tandem_prefill_tokens", "Tokens computed in prefill")
    decode_tokens = counter("tandem_decode_tokens", "Tokens computed in decode")
    _preemptions = counter(
        "tandem_preemptions", "Sequences that were preempted; their KV is computed again"
    )
    local_prefills = counter(
        "tandem_local_prefills",
        "Prompts prefilled on this worker although it had reserved blocks for a pull",
    )
    _prefill_choices = counter(
        "tandem_prefill_choices",
        "Choices of where to prefill a prompt (remote or local): first choices, and choices "
        "again after a failure",
        "choice",
        "turn",
    )
    prefill_failures = counter(
        "tandem_remote_prefill_failures",
        "Remote prefills that failed at this decode worker",
    )
    kv_bytes_served = counter(
        "tandem_kv_bytes_served",
        "Bytes of KV blocks that this worker sent to other workers over gRPC",
    )
    _kv_bytes = counter(
        "tandem_kv_bytes_pulled", "Bytes of KV blocks that this worker pulled", "transport"
    )
    _kv_blocks = counter("tandem_kv_blocks_pulled", "Blocks pulled", "transport")
    _pull_failures = counter(
        "tandem_pull_failures", "Pulls over NIXL or CUDA IPC that failed or were given up", "reason"
    )
    _blocks_fenced = counter(
        "tandem_blocks_fenced",
        "Blocks that became fenced, because a pull ended while its read could still write them",
    )
    _renewals = counter(
        "tandem_consumer_renewals",
        "Times that the worker replaced an agent for reads to end abandoned reads",
    )
    _kv_blocks_skipped = counter(
        "tandem_kv_blocks_skipped",
        "Blocks of prompts prefilled by another worker that this worker already had",
    )
    block_mismatches = counter(
        "tandem_block_mismatches", "Pulled blocks whose checksum differs from the producer's"
    )
    _prefix_blocks = counter(
        "tandem_prefix_blocks_pulled",
        "Blocks of cached prefixes that this worker pulled before it prefilled a prompt",
        "transport",
    )
    blocks_warmed = counter(
        "tandem_blocks_warmed",
        "KV blocks that this worker copied from other workers when it was new",
    )
    encode_workers = gauge(
        "tandem_encode_workers", "Encode workers from which this worker requests images"
    )
    _encode_requests = counter(
        "tandem_encode_requests",
        "Images that this worker requested from encode workers, by outcome (encoded, busy, late, "
        "lost, wrong). It computed all but those with the outcome encoded itself",
        "outcome",
    )
    image_s = histogram(
        "tandem_image_seconds",
        "Seconds in which this encode worker computed an image",
        (*_SECONDS, 60, 120),
    )
    _transfer = histogram(
        "tandem_transfer_seconds",
        "Duration of all pulls of a prompt, in seconds",
        _SECONDS,
        "transport",
    )
    _exposed = histogram(
        "tandem_transfer_exposed_seconds",
        "Seconds from the first token of a remote prefill to the end of its lease",
        _SECONDS,
        "transport",
    )
    _second_token = histogram(
        "tandem_second_token_seconds",
        "Seconds from the first token to the second, by how the prompt's KV blocks came",
        _SECONDS,
        "transport",
    )

    def __init__(self, *, worker_id: str, role: str) -> None:
        self._stats = EngineStats()  # statistics of the newest step
        self._damage = TierDamage()
        # current role, which may change; each sample gets the role as a label at the scrape
        self.role = role
        self._labels = {"worker": worker_id}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # metrics of the I/O process
        self.tally = EngineTally()
        self.requests = RequestMetrics(self._registry, self._labels, self.tally)
        super().__init__(self._registry, self._labels)
        self._memory.set_function(lambda: read_memory().free_bytes)

    def on_step(self, step: StepReport) -> None:
        self._stats = step.stats
        self._damage.take(step.stats.tiers)
        if step.stats.speculation is not None:
            self.tally.speculation = step.stats.speculation
        if step.num_prefill_tokens or step.num_decode_tokens:
            self.steps.inc()
            self.step_s.observe(step.step_ms / 1000)
            self.tally.add_step(step.num_prefill_tokens + step.num_decode_tokens)
            self.prefill_tokens.inc(step.num_prefill_tokens)
            self.decode_tokens.inc(step.num_decode_tokens)

    @property
    def tiers(self) -> tuple[TierUse, ...]:
        """The state of the tiers below the pool after the newest step."""
        return tuple(
            TierUse(t.name, t.blocks_total, t.blocks_held, self._damage.num_blocks(t.name))
            for t in self._stats.tiers
        )

    def on_transfer(self, reply: TransferReply) -> None:
        match reply:
            case PullsSettled(results):
                for result in results:
                    self._count(result)
            case Renewed(num_times):
                self._renewals.inc(num_times)

    def _count(self, result: PullResult) -> None:
        nixl = self.tally.nixl
        if result.done:
            nixl.add_pull(
                seconds=result.elapsed_s,
                post_s=result.post_s,
                num_bytes=result.num_bytes,
                num_blocks=result.num_blocks,
            )
            return
        reason = result.reason or "refused"
        self._pull_failures.labels(**self._labels, reason=reason).inc()
        self._blocks_fenced.inc(result.num_fenced)
        if reason != "cancelled":
            nixl.add_failed()

    def on_lost_lease(self, lease: ConsumerLease) -> None:
        """Counts a lost lease over NIXL or CUDA IPC if the consumer sent `release` but got no
        confirmation."""
        if lease.is_unconfirmed and lease.peer.transport != "grpc":
            self.tally.nixl.add_unconfirmed()

    def on_preemptions(self, num_preemptions: int) -> None:
        self._preemptions.inc(num_preemptions)
        self.tally.add_preemptions(num_preemptions)

    def on_encode_request(self, outcome: str) -> None:
        self._encode_requests.labels(**self._labels, outcome=outcome).inc()

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
        blocks = self._prefix_blocks.labels(**self._labels, transport=peer.transport)
        blocks.inc(stats.num_blocks)

    def on_second_token(self, transport: str, seconds: float) -> None:
        self._second_token.labels(**self._labels, transport=transport).observe(seconds)

    def watch(
        self, publisher: Publisher, adapters: Callable[[Mapping[str, str]], Iterable[Metric]]
    ) -> None:
        """Adds the metrics of the worker's adapters, its tiers and its updates of the prefix
        tree.
        """
        self._registry.register(_AtScrape(partial(index_metrics, self._labels, publisher)))
        self._registry.register(_AtScrape(partial(adapters, self._labels)))
        self._registry.register(_AtScrape(lambda: tier_metrics(self._labels, self._stats)))
        self._registry.register(
            _AtScrape(lambda: speculation_metrics(self._labels, self.tally.speculation))
        )

    def collect(self) -> Iterable[Metric]:
        """Returns the current values of all metrics. The gauges of the worker's load are included
        after `serve` was called.
        """
        return _WithRole(self._registry, self).collect()

    def serve(
        self,
        host: str,
        port: int,
        load: Callable[[], WorkerLoad],
        pairs: Callable[[], Mapping[str, PairRate]],
        probes: Probes,
    ) -> int:
        """Starts the endpoint of metrics and probes; returns its port."""
        self._registry.register(_AtScrape(lambda: self._gauges(load(), pairs())))
        scraped: Any = _WithRole(self._registry, self)
        app = probes.around(make_wsgi_app(scraped))
        return BoundedServer(app, host, port, name="metrics").port

    def _gauges(
        self, load: WorkerLoad, pairs: Mapping[str, PairRate]
    ) -> Iterable[GaugeMetricFamily]:
        names = list(self._labels)
        values = list(self._labels.values())
        for name, text in _HELP.items():
            yield gauges(f"tandem_{name}", text, names, [(values, getattr(load, name))])
        text = "Share of the KV pool that live sequences use, from 0 to 1"
        yield gauges("tandem_kv_cache_usage_perc", text, names, [(values, load.kv_use)])
        for name, text, value in _PAIRS:
            rows = [([*values, peer, rate.transport], value(rate)) for peer, rate in pairs.items()]
            yield gauges(f"tandem_pair_{name}", text, [*names, "peer", "transport"], rows)


class _WithRole:
    """A registry that adds the current `role` to the worker's samples."""

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


class _AtScrape(Collector):
    """Metrics that the function `read` creates at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def index_metrics(labels: Mapping[str, str], publisher: Publisher) -> Iterator[Metric]:
    names = list(labels)
    values = list(labels.values())
    for name, text, number in (
        ("blocks", "Blocks of this worker that the prefix tree should have", publisher.num_held),
        (
            "lag_blocks",
            "Changes of this worker's blocks that the prefix tree does not have yet",
            publisher.lag,
        ),
    ):
        yield gauges(f"tandem_index_{name}", text, names, [(values, number)])
    for name, text, number in (
        (
            "published_blocks",
            "Changes of this worker's blocks that the prefix tree has accepted",
            publisher.num_published,
        ),
        (
            "logs",
            "Complete publications of the worker's blocks, including the first one",
            publisher.num_logs,
        ),
    ):
        family = CounterMetricFamily(f"tandem_index_{name}", text, labels=names)
        family.add_metric(values, number)
        yield family


class TierDamage:
    """Counts, for each tier, the blocks that recently could not be read.

    The object store is not counted, because the bucket's own rules delete blocks there. Blocks that
    were already bad in the first report of a tier are not counted either, because the tier could
    not recover them when it started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_bad: dict[str, int] = {}  # tier -> number of bad blocks in the last report
        # tier -> (number of recent bad blocks, time when the newest of them was found)
        self._lately: dict[str, tuple[int, float]] = {}

    def take(self, tiers: Iterable[TierStats]) -> None:
        """Updates the counts from the tiers' state in a step report."""
        for tier in tiers:
            num_new = tier.blocks_bad - self._num_bad.get(tier.name, tier.blocks_bad)
            self._num_bad[tier.name] = tier.blocks_bad
            if num_new and tier.name not in SHARED_TIERS:
                self._lately[tier.name] = self.num_blocks(tier.name) + num_new, self._clock()

    def num_blocks(self, tier: str) -> int:
        """Returns the number of a tier's blocks that recently could not be read."""
        number, found_at = self._lately.get(tier, (0, 0.0))
        return number if self._clock() - found_at < DAMAGE_S else 0


def speculation_metrics(
    labels: Mapping[str, str], stats: SpeculationStats
) -> Iterator[CounterMetricFamily]:
    for name, text, value in (
        ("proposed", "Proposed tokens that a step has verified", stats.num_draft_tokens),
        ("accepted", "Proposed tokens that were accepted", stats.num_accepted_tokens),
    ):
        family = CounterMetricFamily(f"tandem_{name}_tokens", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family


def _peer_load_metrics(labels: Mapping[str, str], stats: PeerLoadStats) -> Iterator[Metric]:
    text = "Loads from tiers for peers, by their result"
    loads = CounterMetricFamily("tandem_kv_peer_loads", text, labels=[*labels, "result"])
    for result, count in stats.results.items():
        loads.add_metric([*labels.values(), result], count)
    yield loads
    for name, text, value in (
        ("seconds", "Seconds in which peers waited for loads from tiers", stats.seconds),
        ("blocks", "Blocks loaded from tiers for peers", stats.blocks),
    ):
        family = CounterMetricFamily(f"tandem_kv_peer_load_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family


def tier_metrics(labels: Mapping[str, str], stats: EngineStats) -> Iterator[Metric]:
    names = [*labels, "tier"]
    for name, text, value in _TIER_GAUGES:
        rows = [([*labels.values(), tier.name], value(tier)) for tier in stats.tiers]
        yield gauges(f"tandem_kv_tier_{name}", text, names, rows)
    for name, text, value in _TIER_COUNTERS:
        family = CounterMetricFamily(f"tandem_kv_tier_{name}", text, labels=names)
        for tier in stats.tiers:
            family.add_metric([*labels.values(), tier.name], value(tier))
        yield family
    text = (
        "Cached blocks that the pool evicted and no tier has, also blocks that the policy does "
        "not copy"
    )
    dropped = CounterMetricFamily("tandem_kv_blocks_dropped", text, labels=list(labels))
    dropped.add_metric(list(labels.values()), stats.blocks_dropped)
    yield dropped
    yield from _peer_load_metrics(labels, stats.peer_loads)
    names = [*labels, "place"]
    rows = [([*labels.values(), pin.place], pin.blocks) for pin in stats.pins]
    yield gauges(
        "tandem_kv_pinned_blocks", "Blocks that are pinned and so evicted last", names, rows
    )
    text = "Blocks by the fate of their pins: pinned, expired, trimmed, evicted or refused"
    fates = CounterMetricFamily("tandem_kv_pins", text, labels=[*names, "fate"])
    for pin in stats.pins:
        for fate, num_blocks in pin.fates.items():
            fates.add_metric([*labels.values(), pin.place, fate], num_blocks)
    yield fates
