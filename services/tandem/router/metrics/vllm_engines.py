"""Exports the counts and loads in the workers' records as metrics under vLLM's names."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from tandem.common.engine_counts import (
    POST_S,
    PULL_BLOCKS,
    PULL_BYTES,
    PULL_S,
    STEP_TOKENS,
    EngineCounts,
    NixlCounts,
    Observed,
)
from tandem.net.store.registry import WorkerRecord

_LABELS = ("model_name", "engine")
_COUNTERS: tuple[tuple[str, str, Callable[[EngineCounts], float]], ...] = (
    ("num_preemptions", "Sequences that were preempted", lambda c: c.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens", lambda c: c.prompt_tokens),
    (
        "prefix_cache_hits",
        "Prompt tokens whose KV was in the worker's KV pool",
        lambda c: c.cached_here,
    ),
    (
        "external_prefix_cache_queries",
        "Prompt tokens whose KV was not in the worker's KV pool",
        lambda c: c.prompt_tokens - c.cached_here,
    ),
    (
        "external_prefix_cache_hits",
        "Prompt tokens whose KV came from a KV tier or another worker",
        lambda c: c.cached_elsewhere,
    ),
    (
        "spec_decode_num_drafts",
        "Proposals that a step has verified",
        lambda c: c.speculation.num_drafts,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Proposed tokens that a step has verified",
        lambda c: c.speculation.num_draft_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Proposed tokens that were accepted",
        lambda c: c.speculation.num_accepted_tokens,
    ),
    ("nixl_num_failed_transfers", "Pulls over NIXL that failed", lambda c: c.nixl.num_failed),
    (
        "nixl_num_failed_notifications",
        "Leases whose release the producer did not confirm",
        lambda c: c.nixl.num_unconfirmed,
    ),
    (
        "nixl_num_kv_expired_reqs",
        "Leases of this worker's KV that ended before the consumer released it, including "
        "clients that left",
        lambda c: c.nixl.num_expired,
    ),
)
_NIXL: tuple[tuple[str, str, Sequence[float], Callable[[NixlCounts], Observed]], ...] = (
    ("xfer_time_seconds", "Duration of whole pulls, in seconds", PULL_S, lambda n: n.seconds),
    (
        "post_time_seconds",
        "Seconds in which NIXL took the reads of a pull",
        POST_S,
        lambda n: n.post_s,
    ),
    ("bytes_transferred", "Bytes of each pull", PULL_BYTES, lambda n: n.num_bytes),
    ("num_descriptors", "KV blocks of each pull", PULL_BLOCKS, lambda n: n.num_blocks),
)
# vLLM's names for the sources of a prompt token's KV. KV that a prefill worker computed for this
# request counts as `local_compute` although the decode worker pulls it.
_SOURCES: tuple[tuple[str, Callable[[EngineCounts], float]], ...] = (
    ("local_compute", lambda c: c.prompt_tokens - c.cached_here - c.cached_elsewhere),
    ("local_cache_hit", lambda c: c.cached_here),
    ("external_kv_transfer", lambda c: c.cached_elsewhere),
)


def engine_metrics(workers: Sequence[WorkerRecord], model_name: str) -> Iterator[Metric]:
    """Yields the metrics one after another. Each metric has samples of all workers."""
    engines = [((model_name, worker.worker_id), worker.counts) for worker in workers]
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for engine, counts in engines:
            counter.add_metric(engine, value(counts))
        yield counter
    yield _by_source(engines)
    yield _accepted_at(engines)
    yield _waiting(workers, model_name)
    steps = [(engine, Observed(c.step_tokens, c.steps)) for engine, c in engines]
    yield _histogram("iteration_tokens_total", "Tokens of each engine step", STEP_TOKENS, steps)
    for name, text, bounds, read in _NIXL:
        observed = [(engine, read(counts.nixl)) for engine, counts in engines]
        yield _histogram(f"nixl_{name}", text, bounds, observed)


def _histogram(
    name: str,
    text: str,
    bounds: Sequence[float],
    engines: Iterable[tuple[tuple[str, str], Observed]],
) -> Metric:
    """Returns one metric with a histogram for each engine.

    During an upgrade, engines of another version may use other buckets. These engines are left out.
    """
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    les = (*map(floatToGoString, bounds), "+Inf")
    for engine, observed in engines:
        if len(observed.buckets) == len(les):
            buckets = zip(les, map(float, accumulate(observed.buckets)), strict=True)
            family.add_metric(engine, list(buckets), observed.total)
    return family


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


def _accepted_at(engines: Sequence[tuple[tuple[str, str], EngineCounts]]) -> Metric:
    counter = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Proposed tokens that were accepted, by their position in the proposal",
        labels=(*_LABELS, "position"),
    )
    for engine, counts in engines:
        for position, count in enumerate(counts.speculation.num_accepted_at):
            counter.add_metric((*engine, str(position)), count)
    return counter


def _waiting(workers: Sequence[WorkerRecord], model_name: str) -> Metric:
    """Returns each engine's number of sequences that wait, by reason.

    The reasons are "capacity" and "deferred". A deferred sequence waits for KV of another worker.
    """
    gauge = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences that wait, by reason: capacity or deferred (for KV of another worker)",
        labels=(*_LABELS, "reason"),
    )
    for worker in workers:
        gauge.add_metric((model_name, worker.worker_id, "capacity"), worker.load.num_waiting)
        gauge.add_metric((model_name, worker.worker_id, "deferred"), worker.load.num_pulls)
    return gauge
