"""Metrics of a worker's log in the prefix tree, read from its publisher at each scrape."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.prefix_index.publisher import Publisher

_FAMILIES: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str], ...] = (
    (
        GaugeMetricFamily,
        "index_blocks",
        "Blocks that it holds, as the tree should have them",
        "num_held",
    ),
    (
        GaugeMetricFamily,
        "index_lag_blocks",
        "Changes that the prefix tree does not have yet",
        "lag",
    ),
    (
        CounterMetricFamily,
        "index_published_blocks",
        "Changes that the prefix tree took",
        "num_published",
    ),
    (
        CounterMetricFamily,
        "index_logs",
        "How often everything was published anew, the first time too",
        "num_logs",
    ),
)


class IndexMetrics(Collector):
    def __init__(self, labels: Mapping[str, str], publisher: Publisher) -> None:
        self._labels = labels
        self._publisher = publisher

    def collect(self) -> Iterable[Metric]:
        for kind, name, text, value in _FAMILIES:
            family = kind(f"tandem_{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), getattr(self._publisher, value))
            yield family
