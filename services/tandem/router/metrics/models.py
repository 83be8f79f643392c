"""Merges the metrics of several models into one set."""

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Metrics of the router, which only the first model's registry counts.
_OF_ROUTER = frozenset(
    {
        *("tandem_http_requests", "tandem_http_request_duration_seconds", "tandem_router_serving"),
        *("tandem_redis_up", "tandem_control_up", "tandem_placement_hints"),
        *("http_requests", "http_request_duration_seconds"),
        *("tandem_prefix_lookups", "tandem_prefix_lookup_seconds"),
    }
)
# The same, by the beginning of their names: metrics of the process, of tenants' usage and limits,
# and of the prefix tree, which are those of all models together.
_OF_ROUTER_TOO = (
    *("process_", "tandem_tenant_"),
    *("tandem_prefix_index_", "tandem_prefix_replica_", "tandem_prefix_tokens_"),
)


class Labelled(Collector):
    """The metrics of one model, with the label `model_name`."""

    def __init__(self, registry: Collector, model_name: str) -> None:
        self._registry = registry
        self._model = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics. Those of the router and of its process have no label."""
        for metric in self._registry.collect():
            if _is_of_router(metric):
                yield metric
                continue
            made = Metric(metric.name, metric.documentation, metric.type)
            made.samples = [
                sample._replace(labels={**self._model, **sample.labels})
                for sample in metric.samples
            ]
            yield made


class _Merged(Collector):
    def __init__(self, models: Sequence[Collector]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in chain.from_iterable(model.collect() for model in self._models):
            if metric.name not in families:
                families[metric.name] = metric
            elif not _is_of_router(metric):
                families[metric.name].samples.extend(metric.samples)
        yield from families.values()


def _is_of_router(metric: Metric) -> bool:
    return metric.name in _OF_ROUTER or metric.name.startswith(_OF_ROUTER_TOO)


def merged(models: Sequence[Collector]) -> Collector:
    """Returns the metrics of all models, each family once. Metrics of the router are those of the
    first model's registry. The samples of the models must have different labels."""
    return models[0] if len(models) == 1 else _Merged(models)
