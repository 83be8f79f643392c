"""Lets a class declare Prometheus metrics as attributes. Routers and workers use the same histogram
buckets.

In this example, `Requests` declares a counter, and each instance of `Requests` has its own counter:

class Requests(MetricSet):
    ended = counter("tandem_requests", "Requests by outcome", "outcome")

Requests(registry).ended.labels(outcome="stop").inc()
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase

# vLLM's histogram buckets in seconds, so that dashboards can compare Tandem with vLLM.
_FAST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TTFT_S = (*_FAST_S, 20, 40, 80, 160, 640)
ITL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

M = TypeVar("M", bound=MetricWrapperBase)


@dataclass(frozen=True)
class Declared(Generic[M]):
    """The declaration of a metric as an attribute of a MetricSet class. In an instance of the
    class, the attribute is the registered metric."""

    kind: type[M]
    name: str
    text: str
    labels: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __get__(self, owner: object, owner_type: type | None = None) -> M:
        raise AttributeError(f"the metric {self.name} cannot be used before it is registered")

    def register(self, registry: CollectorRegistry, common: Mapping[str, str]) -> M:
        names = [*common, *self.labels]
        metric = self.kind(self.name, self.text, names, registry=registry, **self.options)
        return metric.labels(**common) if common and not self.labels else metric


def counter(name: str, text: str, *labels: str) -> Declared[Counter]:
    return Declared(Counter, name, text, labels)


def gauge(name: str, text: str, *labels: str) -> Declared[Gauge]:
    return Declared(Gauge, name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Declared[Histogram]:
    """Declares a histogram. `buckets` has the upper bounds of the buckets. Their unit is at the end
    of the metric's name, such as "_seconds"."""
    return Declared(Histogram, name, text, labels, {"buckets": buckets})


class MetricSet:
    """Base class of classes that declare metrics. A new instance registers all metrics of its
    class, in the order of their declaration."""

    def __init__(
        self, registry: CollectorRegistry, common: Mapping[str, str] | None = None
    ) -> None:
        """`common` maps label names to values. Every metric gets these labels with these values, so
        callers call `labels` only for a metric's other labels."""
        for name, declared in vars(type(self)).items():
            if isinstance(declared, Declared):
                setattr(self, name, declared.register(registry, common or {}))


def gauges(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Builds a family of gauges. Each row is (values of the labels, value of the gauge)."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
