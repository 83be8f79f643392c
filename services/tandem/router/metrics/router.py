"""The router's metrics. They have the usual names of LLM servers, with the prefix `tandem_`.

Each router has its own Prometheus registry, so that tests may run several routers in one process.
Gauges of workers are read from the cluster view at each scrape.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.common.config.cluster import Role
from tandem.net.observability.metrics import (
    E2E_S,
    ITL_S,
    TTFT_S,
    MetricSet,
    counter,
    gauge,
    gauges,
    histogram,
)
from tandem.router.autoscaler.demand import DemandMeter
from tandem.router.metrics.flows import Flows
from tandem.router.metrics.gen_ai import NO_GEN_AI_METRICS, EndedRequest, GenAiMetrics
from tandem.router.metrics.latencies import Latencies
from tandem.router.metrics.timeline import STAGES
from tandem.router.placement.costs import WorkerSnapshot
from tandem.router.placement.reasons import REASONS

if TYPE_CHECKING:
    from tandem.router.workers.cluster_view import ClusterView

_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_HTTP_S = (0.1, 0.5, 1, 10, 60)
_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerSnapshot], float]], ...] = (
    ("worker_up", "1 if the worker is usable for this router, otherwise 0", lambda w: w.usable),
    (
        "worker_num_requests_running",
        "Sequences in the worker's batch",
        lambda w: w.load.num_running,
    ),
    (
        "worker_num_requests_waiting",
        "Sequences in the worker's queue",
        lambda w: w.load.num_waiting,
    ),
    (
        "worker_kv_cache_usage_perc",
        "Share of the worker's KV pool that sequences use, from 0 to 1",
        lambda w: w.load.kv_use,
    ),
)


class Metrics(MetricSet):
    """Counters and histograms that the request path updates."""

    ttft_s = histogram(
        "tandem_time_to_first_token_seconds",
        "Seconds from the checked request to its first token",
        TTFT_S,
    )
    itl_s = histogram(
        "tandem_inter_token_latency_seconds", "Seconds between two tokens of a request", ITL_S
    )
    e2e_s = histogram(
        "tandem_e2e_request_latency_seconds", "Seconds from the checked request to its end", E2E_S
    )
    prepare_s = histogram(
        "tandem_request_prepare_seconds",
        "Seconds in which the router renders, tokenizes and hashes the prompt",
        ITL_S,
    )
    tpot_s = histogram(
        "tandem_request_time_per_output_token_seconds",
        "Mean seconds between the tokens of a request after its first token",
        ITL_S,
    )
    decode_s = histogram(
        "tandem_request_decode_seconds", "Seconds from a request's first token to its last", E2E_S
    )
    stage_s = histogram(
        "tandem_request_stage_seconds",
        "Seconds in each stage of requests that ended well (docs/operations.md)",
        TTFT_S,
        "stage",
    )
    request_prompt_tokens = histogram(
        "tandem_request_prompt_tokens", "Prompt tokens of requests that ended well", _TOKENS
    )
    request_generation_tokens = histogram(
        "tandem_request_generation_tokens", "Output tokens of requests that ended well", _TOKENS
    )
    prompt_tokens = counter("tandem_prompt_tokens", "Prompt tokens of requests that ended well")
    generation_tokens = counter(
        "tandem_generation_tokens", "Output tokens that were sent to clients"
    )
    cached_tokens = counter(
        "tandem_prompt_tokens_cached",
        "Prompt tokens, of requests that ended well, whose KV was reused",
    )
    cached_by_tier = counter(
        "tandem_prompt_tokens_cached_by_tier",
        "Prompt tokens whose KV was reused at workers with KV tiers, by where the KV was",
        "tier",
    )
    pulled_bytes = counter(
        "tandem_kv_pulled_bytes",
        "Bytes of KV that decode workers pulled for requests that ended well",
    )
    requests = counter(
        "tandem_requests",
        "Requests by outcome: stop, length, cancelled, or an error's code",
        "kind",
        "outcome",
    )
    http_requests = counter(
        "tandem_http_requests",
        "Calls of the public HTTP API, without probes",
        "method",
        "handler",
        "status",
    )
    http_request_duration_s = histogram(
        "tandem_http_request_duration_seconds",
        "Seconds from the header of a call to the last byte of its answer",
        _HTTP_S,
        "method",
        "handler",
    )
    requests_running = gauge("tandem_num_requests_running", "Requests that are open in this router")
    requests_pending = gauge(
        "tandem_num_requests_waiting",
        "Requests that wait in this router, because no decode worker is usable or no worker has "
        "capacity",
    )
    serving = gauge(
        "tandem_router_serving",
        "1 while this router can serve requests; the event `mode` says why it cannot",
    )
    lookups_failed = counter(
        "tandem_prefix_lookups_failed",
        "Placements without the prefix tree, because the look-up was late or Redis is lost",
    )
    placements = counter(
        "tandem_placements", "Submissions to workers by the reason of their placement", "reason"
    )
    picks = counter(
        "tandem_endpoint_picks",
        "Requests at an endpoint picker, by the reason of their placement or the code of the error",
        "reason",
    )
    hints = counter(
        "tandem_placement_hints",
        "Requests with an endpoint picker's hint, at a router with --front-of: followed, "
        "other_worker or invalid",
        "outcome",
    )
    refusals = counter(
        "tandem_worker_refusals",
        "Submissions that a worker refused, by the code of its error",
        "code",
    )
    migrations = counter(
        "tandem_request_migrations",
        "Requests that moved to another worker, because their worker was lost (crash) or leaves "
        "(drain)",
        "reason",
    )

    def __init__(
        self, gen_ai: GenAiMetrics = NO_GEN_AI_METRICS, *, has_process: bool = True
    ) -> None:
        """`has_process`: True if the registry has the metrics of this process, too."""
        self.gen_ai = gen_ai
        self.registry = CollectorRegistry()
        self.demand = DemandMeter()  # demand and latencies for the autoscaler
        # For the operators' page: recent pulls and migrations between workers, and the latencies of
        # the last minute.
        self.flows = Flows()
        self.first_tokens = Latencies()
        self.next_tokens = Latencies()
        if has_process:
            ProcessCollector(registry=self.registry)
        super().__init__(self.registry)
        self._stages = {stage: self.stage_s.labels(stage=stage) for stage in STAGES}
        for reason in REASONS:
            self.placements.labels(reason=reason)

    def on_first_token(self, elapsed_s: float, allowed_s: float) -> None:
        """Records a time to first token of `elapsed_s` seconds, whose target is `allowed_s`."""
        self.ttft_s.observe(elapsed_s)
        self.first_tokens.add(elapsed_s, is_late=elapsed_s > allowed_s)
        self.demand.first_token(elapsed_s / allowed_s)

    def on_next_tokens(self, each_s: float, allowed_s: float, num_tokens: int) -> None:
        """Records `num_tokens` tokens after the first, which each took `each_s` seconds.

        `allowed_s` is the target for `each_s`.
        """
        for _ in range(num_tokens):
            self.itl_s.observe(each_s)
            self.next_tokens.add(each_s, is_late=each_s > allowed_s)
        self.demand.next_tokens(each_s / allowed_s, num_tokens)

    def on_end(self, record: EndedRequest) -> None:
        """Records a request that has ended, whatever its outcome."""
        self.requests_running.dec()
        self.gen_ai.on_end(record)
        self.requests.labels(kind=record.kind, outcome=record.outcome).inc()
        timeline = record.timeline
        e2e_s = record.e2e_s
        assert e2e_s is not None
        self.e2e_s.observe(e2e_s)
        if "tokenize" in timeline.stages_s:
            self.prepare_s.observe(timeline.stages_s["tokenize"])
        if record.error or record.outcome == "cancelled":
            return
        usage = record.facts["usage"]
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.cached_tokens.inc(usage["cached_tokens"])
        self.pulled_bytes.inc(record.facts["bytes_pulled"])
        for tier, num_tokens in usage.get("cached_tokens_by_tier", {}).items():
            self.cached_by_tier.labels(tier=tier).inc(num_tokens)
        self.request_prompt_tokens.observe(usage["prompt_tokens"])
        self.request_generation_tokens.observe(record.num_sent)
        for stage, seconds in timeline.stages_s.items():
            self._stages[stage].observe(seconds)
        if timeline.ttft_s is None:
            return
        decode_s = timeline.last_token_s - timeline.began_s - timeline.ttft_s
        self.decode_s.observe(decode_s)
        if timeline.num_tokens > 1:
            self.tpot_s.observe(decode_s / (timeline.num_tokens - 1))


class WorkerGauges(Collector):
    """Metrics of the workers that this router knows, read at a scrape."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        workers = self._view.snapshots()
        for name, text, value in _OF_WORKERS:
            rows = [((w.worker_id, w.role), value(w)) for w in workers]
            yield gauges(f"tandem_{name}", text, ["worker", "role"], rows)
        usable = Counted(w.role for w in workers if w.usable)
        roles = [((role,), usable[role]) for role in get_args(Role)]  # 0 for a role without workers
        yield gauges("tandem_workers_usable", "Usable workers of each pool", ["role"], roles)
        pools = self._view.pool_watch
        sizes = [((name,), float(size)) for name, size in pools.sizes.items()]
        text = "Wanted number of processes of the pool, as set by the owner of its size"
        yield gauges("tandem_pool_size", text, ["pool"], sizes)
        ready = [((name,), float(number)) for name, number in pools.ready.items()]
        text = "Ready workers of the pool, including workers that are lent to the other pool"
        yield gauges("tandem_pool_workers_ready", text, ["pool"], ready)
        problems = self._view.problems
        ill = [((r.worker_id, r.pool, r.problem), 1.0) for r in problems.rows if r.problem]
        labels = ["worker", "pool", "problem"]
        yield gauges(
            "tandem_worker_problem",
            "1 for each worker with a problem, which the label `problem` names",
            labels,
            ill,
        )
        starts = [((name,), float(num)) for name, num in problems.num_starts.items()]
        text = "Number of times that the worker's process was started again after it had ended"
        yield gauges("tandem_worker_starts", text, ["worker"], starts)
        control = self._view.control
        parts = (("head", control.head_is_gone), ("controller", control.controller_silent_s > 0))
        up = [((part,), float(not is_gone)) for part, is_gone in parts if control.is_kept]
        text = (
            "1 if Ray's head or the pool controller (label `part`) shows signs of life, otherwise 0"
        )
        yield gauges("tandem_control_up", text, ["part"], up)
        redis_up = float(self._view.redis_state == "ok")
        yield gauges(
            "tandem_redis_up", "1 if Redis answers this router, otherwise 0", (), [((), redis_up)]
        )
