"""The counts and loads in the workers' records, under vLLM's names."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from tandem.engine_counts import STEP_TOKENS, EngineCounts
from tandem.store.registry import WorkerRecord

_LABELS = ("model_name", "engine")
_BOUNDS = (*map(floatToGoString, STEP_TOKENS), "+Inf")
_COUNTERS: tuple[tuple[str, str, Callable[[EngineCounts], float]], ...] = (
    ("num_preemptions", "Sequences that were preempted", lambda c: c.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens", lambda c: c.prompt_tokens),
    ("prefix_cache_hits", "Those whose KV was in the pool", lambda c: c.cached_here),
    (
        "external_prefix_cache_queries",
        "Those whose KV was not in the pool",
        lambda c: c.prompt_tokens - c.cached_here,
    ),
    (
        "external_prefix_cache_hits",
        "Those whose KV a tier or another worker had",
        lambda c: c.cached_elsewhere,
    ),
)
# What a prefill worker computed for a prompt counts as computed.
_SOURCES: tuple[tuple[str, Callable[[EngineCounts], float]], ...] = (
    ("local_compute", lambda c: c.prompt_tokens - c.cached_here - c.cached_elsewhere),
    ("local_cache_hit", lambda c: c.cached_here),
    ("external_kv_transfer", lambda c: c.cached_elsewhere),
)


def engine_metrics(workers: Sequence[WorkerRecord], model_name: str) -> Iterator[Metric]:
    """Yields the metrics of all engines, each with the samples of all workers."""
    engines = [((model_name, worker.worker_id), worker.counts) for worker in workers]
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for engine, counts in engines:
            counter.add_metric(engine, value(counts))
        yield counter
    yield _by_source(engines)
    yield _waiting(workers, model_name)
    steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS)
    for engine, counts in engines:
        buckets = zip(_BOUNDS, map(float, accumulate(counts.steps)), strict=True)
        steps.add_metric(engine, list(buckets), counts.step_tokens)
    yield steps


def _by_source(engines: Sequence[tuple[tuple[str, str], EngineCounts]]) -> Metric:
    counter = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from",
        labels=(*_LABELS, "source"),
    )
    for engine, counts in engines:
        for source, value in _SOURCES:
            counter.add_metric((*engine, source), value(counts))
    return counter


def _waiting(workers: Sequence[WorkerRecord], model_name: str) -> Metric:
    """Returns the sequences that wait for room, and those that wait for KV of another worker."""
    gauge = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences that wait, by what for",
        labels=(*_LABELS, "reason"),
    )
    for worker in workers:
        gauge.add_metric((model_name, worker.worker_id, "capacity"), worker.load.num_waiting)
        gauge.add_metric((model_name, worker.worker_id, "deferred"), worker.load.num_pulls)
    return gauge
