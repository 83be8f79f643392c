"""Metrics of a worker's log in the prefix tree. They are read from its publisher at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from tandem.net.observability.metrics import gauges
from tandem.prefix_index.publisher import Publisher


def index_metrics(labels: Mapping[str, str], publisher: Publisher) -> Iterator[Metric]:
    names = list(labels)
    values = list(labels.values())
    for name, text, number in (
        ("blocks", "Blocks that it holds, as the tree should have them", publisher.num_held),
        ("lag_blocks", "Changes that the prefix tree does not have yet", publisher.lag),
    ):
        yield gauges(f"tandem_index_{name}", text, names, [(values, number)])
    for name, text, number in (
        ("published_blocks", "Changes that the prefix tree took", publisher.num_published),
        ("logs", "How often everything was published anew, the first time too", publisher.num_logs),
    ):
        family = CounterMetricFamily(f"tandem_index_{name}", text, labels=names)
        family.add_metric(values, number)
        yield family
