"""The router's metrics under vLLM's names, for dashboards and tools made for vLLM.

As in vLLM, all metrics except those of the HTTP server have the label `model_name`. The metrics of
a worker also have the label `engine`. Names and labels follow vLLM's documentation, "Production
Metrics", and vLLM's dashboards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem.errors import from_code
from tandem.net.store.registry import WorkerRecord
from tandem.router.metrics.vllm_engines import engine_metrics

Labels = dict[str, str]


def _none(_: Labels) -> Labels:
    return {}


@dataclass(frozen=True)
class _Name:
    """One of vLLM's metrics, and how its samples are made from those of a Tandem metric.

    `labels` maps the labels of a Tandem sample to vLLM's labels, or to None if vLLM has no such
    sample. Tandem samples that map to the same labels are summed. `always` lists labels for which
    the metric has a sample of 0 even before anything was counted.
    """

    name: str
    labels: Callable[[Labels], Labels | None] = _none
    always: Sequence[Labels] = ()

    @property
    def is_of_a_model(self) -> bool:
        """True if the metric has the label `model_name`."""
        return self.name.startswith("vllm:")


_REASONS = ("stop", "length", "abort", "error")


def _engine(labels: Labels) -> Labels:
    return {"engine": labels["worker"]}


def _stage(stage: str, vllm: str) -> _Name:
    return _Name(f"vllm:{vllm}", lambda labels: {} if labels["stage"] == stage else None)


def _finished(labels: Labels) -> Labels | None:
    """Returns vLLM's labels for the outcome of a request; None if the request was refused."""
    outcome = labels["outcome"]
    reason = {"stop": "stop", "length": "length", "cancelled": "abort"}.get(outcome, "error")
    if reason == "error" and from_code(outcome, "").http_status < 500:
        return None
    return {"finished_reason": reason, "kind": labels["kind"]}


def _same(labels: Labels) -> Labels:
    return {name: value for name, value in labels.items() if name != "le"}


_SAME = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
)
_NAMES: dict[str, Sequence[_Name]] = {  # Tandem's name without `tandem_` -> vLLM's metrics
    **{name: (_Name(f"vllm:{name}"),) for name in _SAME},
    # In vLLM, the `max` metric is the length of the longest of a request's `n` choices. Tandem does
    # not measure it, and exports the total length of all choices under both names.
    "request_generation_tokens": (
        _Name("vllm:request_generation_tokens"),
        _Name("vllm:request_max_num_generation_tokens"),
    ),
    "request_decode_seconds": (_Name("vllm:request_decode_time_seconds"),),
    "request_stage_seconds": (
        _stage("queue", "request_queue_time_seconds"),
        _stage("prefill", "request_prefill_time_seconds"),
    ),
    "requests": (
        _Name(
            "vllm:request_success",
            _finished,
            [{"finished_reason": reason, "kind": "chat"} for reason in _REASONS],
        ),
    ),
    "worker_num_requests_running": (_Name("vllm:num_requests_running", _engine),),
    "worker_num_requests_waiting": (_Name("vllm:num_requests_waiting", _engine),),
    "worker_kv_cache_usage_perc": (_Name("vllm:kv_cache_usage_perc", _engine),),
    "http_requests": (_Name("http_requests", _same),),
    "http_request_duration_seconds": (_Name("http_request_duration_seconds", _same),),
}


class VllmMetrics(Collector):
    """The metrics of a router and of the engines of `workers` under vLLM's names."""

    def __init__(
        self, registry: CollectorRegistry, workers: Sequence[WorkerRecord], model_name: str
    ) -> None:
        self._of_router = _Renamed(registry, model_name)
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics."""
        yield from self._of_router.collect()
        yield from engine_metrics(self._workers, self._model_name)


class _Renamed:
    """Copies those metrics of a Prometheus registry that vLLM also has, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Yields one metric family for each of vLLM's names."""
        for metric in self._registry.collect():
            for name in _NAMES.get(metric.name.removeprefix("tandem_"), ()):
                yield _renamed(metric, name, self._model if name.is_of_a_model else {})


def _renamed(metric: Metric, name: _Name, common: Labels) -> Metric:
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for labels in name.always:
        values["_total", (*common.items(), *labels.items())] = 0.0
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        own = name.labels(sample.labels)
        if own is None or suffix == "_created":
            continue
        bound = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        key = suffix, (*common.items(), *own.items(), *bound.items())
        values[key] = values.get(key, 0.0) + sample.value
    made = Metric(name.name, metric.documentation, metric.type)
    for (suffix, pairs), value in values.items():
        made.add_sample(f"{name.name}{suffix}", dict(pairs), value)
    return made
