"""The router's metrics under vLLM's names, for dashboards and tools that were made for vLLM.

All have the label `model_name`, those of a worker `engine` as well. Source of names and labels:
vLLM's documentation, "Production Metrics". What only one of the two tells is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

Labels = dict[str, str]


def _none(_: Labels) -> Labels:
    return {}


def _engine(labels: Labels) -> Labels:
    return {"engine": labels["worker"]}


@dataclass(frozen=True)
class _Name:
    """One of vLLM's, its labels from those of ours, and which of our samples it has."""

    vllm: str
    labels: Callable[[Labels], Labels] = _none
    only: Mapping[str, tuple[str, ...]] | None = None  # label -> values

    def has(self, labels: Labels) -> bool:
        return all(labels[name] in values for name, values in (self.only or {}).items())


def _stage(stage: str, vllm: str) -> _Name:
    return _Name(vllm, only={"stage": (stage,)})


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
_NAMES: dict[str, tuple[_Name, ...]] = {  # by ours, without `tandem_`
    **{name: (_Name(name),) for name in _SAME},
    # vLLM's second is of the longest choice, which is of all choices here.
    "request_generation_tokens": (
        _Name("request_generation_tokens"),
        _Name("request_max_num_generation_tokens"),
    ),
    "request_decode_seconds": (_Name("request_decode_time_seconds"),),
    "request_stage_seconds": (
        _stage("queue", "request_queue_time_seconds"),
        _stage("prefill", "request_prefill_time_seconds"),
    ),
    "requests": (
        _Name(
            "request_success",
            lambda labels: {"finished_reason": labels["outcome"], "kind": labels["kind"]},
            {"outcome": ("stop", "length")},
        ),
    ),
    "worker_num_requests_running": (_Name("num_requests_running", _engine),),
    "worker_num_requests_waiting": (_Name("num_requests_waiting", _engine),),
    "worker_kv_cache_usage_perc": (_Name("kv_cache_usage_perc", _engine),),
}


class VllmNames:
    """A registry's metrics that vLLM has, too, as they are at a scrape."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            for name in _NAMES.get(metric.name.removeprefix("tandem_"), ()):
                renamed = Metric(f"vllm:{name.vllm}", metric.documentation, metric.type)
                for sample in metric.samples:
                    if name.has(sample.labels):
                        labels = {**self._model, **name.labels(sample.labels)}
                        if "le" in sample.labels:
                            labels["le"] = sample.labels["le"]
                        suffix = sample.name.removeprefix(metric.name)
                        renamed.add_sample(f"{renamed.name}{suffix}", labels, sample.value)
                yield renamed
