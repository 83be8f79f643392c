"""The router's metrics, under the field's names with `tandem:` before them.

One registry a router, so that tests may have several in one process. Gauges of workers are read
from the cluster view at each scrape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.autoscaler.signals import DemandMeter
from tandem.config import Role
from tandem.router.metrics.timeline import STAGES
from tandem.router.placement.reasons import REASONS

if TYPE_CHECKING:
    from tandem.router.request.log import RequestRecord
    from tandem.router.workers.cluster_view import ClusterView

# vLLM's buckets, seconds.
_FAST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_S = (*_FAST_S, 20, 40, 80, 160, 640)
_ITL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """Counters and histograms that the request path writes to."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.demand = DemandMeter()  # for the autoscaler: what was asked for, and how well it went
        ProcessCollector(registry=registry)
        self.ttft_s = Histogram(
            "tandem:time_to_first_token_seconds",
            "From the checked request to its first token",
            registry=registry,
            buckets=_TTFT_S,
        )
        self.itl_s = Histogram(
            "tandem:inter_token_latency_seconds",
            "Between tokens of one request",
            registry=registry,
            buckets=_ITL_S,
        )
        self.e2e_s = Histogram(
            "tandem:e2e_request_latency_seconds",
            "From the checked request to its end",
            registry=registry,
            buckets=_E2E_S,
        )
        self.prepare_s = Histogram(
            "tandem:request_prepare_seconds",
            "Rendering, tokenizing and hashing, off the event loop",
            registry=registry,
            buckets=_ITL_S,
        )
        self.tpot_s = Histogram(
            "tandem:request_time_per_output_token_seconds",
            "Mean time between a request's tokens after its first",
            registry=registry,
            buckets=_ITL_S,
        )
        self.stage_s = Histogram(
            "tandem:request_stage_seconds",
            "Where the time of requests that ended well went (docs/operations.md)",
            ["stage"],
            registry=registry,
            buckets=_TTFT_S,
        )
        self._stages = {stage: self.stage_s.labels(stage=stage) for stage in STAGES}
        self.request_prompt_tokens = Histogram(
            "tandem:request_prompt_tokens",
            "Prompt tokens of requests that ended well",
            registry=registry,
            buckets=_TOKENS,
        )
        self.request_generation_tokens = Histogram(
            "tandem:request_generation_tokens",
            "Tokens made for requests that ended well",
            registry=registry,
            buckets=_TOKENS,
        )
        self.prompt_tokens = Counter(
            "tandem:prompt_tokens", "Prompt tokens of ended requests", registry=registry
        )
        self.generation_tokens = Counter(
            "tandem:generation_tokens", "Tokens made and sent", registry=registry
        )
        self.cached_tokens = Counter(
            "tandem:prompt_tokens_cached", "Prompt tokens whose KV was reused", registry=registry
        )
        self.requests = Counter(
            "tandem:requests",
            "Requests by outcome: stop, length, cancelled, or an error's code",
            ["kind", "outcome"],
            registry=registry,
        )
        self.requests_running = Gauge(
            "tandem:num_requests_running", "Requests inside this router", registry=registry
        )
        self.requests_holding = Gauge(
            "tandem:num_requests_waiting",
            "Requests that this router holds: a pool is empty, or tenants take turns",
            registry=registry,
        )
        self.lookups_failed = Counter(
            "tandem:prefix_lookups_failed",
            "Placements without the prefix tree: its deadline passed, or Redis is lost",
            registry=registry,
        )
        self.placements = Counter(
            "tandem:placements",
            "Submissions to workers, by why they went there",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self.placements.labels(reason=reason)
        self.refusals = Counter(
            "tandem:worker_refusals",
            "Submissions that a worker did not take",
            ["code"],
            registry=registry,
        )
        self.moves = Counter(
            "tandem:request_moves",
            "Requests moved off a worker that was lost (crash) or leaves (drain)",
            ["reason"],
            registry=registry,
        )

    def on_end(self, record: RequestRecord) -> None:
        """A request is over, in whatever way."""
        self.requests_running.dec()
        self.requests.labels(kind=record.kind, outcome=record.outcome).inc()
        timeline, e2e_s = record.timeline, record.e2e_s
        assert e2e_s is not None
        self.e2e_s.observe(e2e_s)
        if "tokenize" in timeline.stages_s:
            self.prepare_s.observe(timeline.stages_s["tokenize"])
        if record.error or record.outcome == "cancelled":
            return
        usage = record.facts["usage"]
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.cached_tokens.inc(usage["cached_tokens"])
        self.request_prompt_tokens.observe(usage["prompt_tokens"])
        self.request_generation_tokens.observe(record.num_sent)
        for stage, seconds in timeline.stages_s.items():
            self._stages[stage].observe(seconds)
        if timeline.ttft_s is not None and record.num_sent > 1:
            decode_s = timeline.last_token_s - timeline.began_s - timeline.ttft_s
            self.tpot_s.observe(decode_s / (record.num_sent - 1))

    def watch(self, view: ClusterView) -> None:
        self.registry.register(_WorkerGauges(view))

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _WorkerGauges(Collector):
    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        up = GaugeMetricFamily("tandem:worker_up", "1 when it may be placed on", labels=labels)
        running = GaugeMetricFamily(
            "tandem:worker_num_requests_running", "Sequences in its batch", labels=labels
        )
        waiting = GaugeMetricFamily(
            "tandem:worker_num_requests_waiting", "Sequences in its queue", labels=labels
        )
        kv_use = GaugeMetricFamily(
            "tandem:worker_kv_cache_usage_perc", "KV blocks in use, 0 to 1", labels=labels
        )
        usable = dict.fromkeys(get_args(Role), 0)  # also of an empty pool
        for worker in self._view.snapshots():
            usable[worker.role] += worker.usable
            values = [worker.worker_id, worker.role]
            up.add_metric(values, float(worker.usable))
            running.add_metric(values, worker.num_running)
            waiting.add_metric(values, worker.num_waiting)
            kv_use.add_metric(values, worker.kv_use)
        yield from (up, running, waiting, kv_use)
        workers = GaugeMetricFamily(
            "tandem:workers_usable", "Workers that may be placed on", labels=["role"]
        )
        for role, count in usable.items():
            workers.add_metric([role], count)
        yield workers
        yield GaugeMetricFamily(
            "tandem:redis_up",
            "1 when Redis answers this router",
            value=float(self._view.redis_state == "ok"),
        )
