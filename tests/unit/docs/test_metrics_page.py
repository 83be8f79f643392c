"""The page docs/reference/metrics.md lists every metric that routers and workers declare."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from tandem.common.speculation import SpeculationStats
from tandem.common.worker_load import WorkerLoad
from tandem.engine.types import AdapterStats, EngineStats
from tandem.net.observability.metrics import Declared, MetricSet
from tandem.prefix_index.audit import TreeStats
from tandem.router.index.metrics import IndexMetrics
from tandem.router.limits.metrics import TenantMetrics
from tandem.router.metrics.router import Metrics, WorkerGauges
from tandem.router.scaling.autoscale import AutoscaleGauges
from tandem.router.workers.control_watch import ControlWatch
from tandem.router.workers.pool_watch import PoolWatch
from tandem.worker.metrics.adapters import adapter_metrics
from tandem.worker.metrics.worker import (
    WorkerMetrics,
    index_metrics,
    speculation_metrics,
    tier_metrics,
)
from tests.harness.documents import ROOT

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
TANDEM = ROOT / "services" / "tandem"
# Sources that make families of metrics, whose names `collected` reads from live objects.
FAMILIES = {
    "router/index/metrics.py",
    "router/metrics/router.py",
    "worker/metrics/adapters.py",
    "worker/metrics/worker.py",
}


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def declared() -> set[str]:
    """Names in the tables of all classes of metrics; counters with their suffix."""
    sets = [kind for kind in subclasses(MetricSet) if kind.__module__.startswith("tandem.")]
    metrics = [m for kind in sets for m in vars(kind).values() if isinstance(m, Declared)]
    return {m.name + "_total" * (m.kind.__name__ == "Counter") for m in metrics}


def collected() -> set[str]:
    """Names of the metrics that are made at a scrape."""
    publisher: Any = SimpleNamespace(num_held=0, lag=0, num_published=0, num_logs=0)
    view: Any = SimpleNamespace(
        snapshots=list,
        redis_state="ok",
        decisions=(),
        problems=SimpleNamespace(rows=[], num_starts={}),
        control=ControlWatch(),
        pool_watch=PoolWatch(),
    )
    index = IndexMetrics(CollectorRegistry())
    index.stats = TreeStats(num_entries=0, num_bytes=0, num_swept=0, workers={})
    replica: Any = SimpleNamespace(num_entries=0, num_bytes=0, silent_s=0, num_loads=0)
    replicated: Any = SimpleNamespace(replica=replica, num_local=0, num_asked=0)
    index.index = replicated
    tenants = CollectorRegistry()
    TenantMetrics(tenants)
    worker = WorkerMetrics(worker_id="decode-0", role="decode")
    families = [
        *adapter_metrics({}, AdapterStats(), 8),
        *index_metrics({}, publisher),
        *tier_metrics({}, EngineStats()),
        *speculation_metrics({}, SpeculationStats()),
        *index.collect(),
        *WorkerGauges(view).collect(),
        *AutoscaleGauges(view).collect(),
        *worker._gauges(WorkerLoad(), {}),
        *Metrics().registry.collect(),
        *tenants.collect(),
        *worker.collect(),
    ]
    names = {f.name + "_total" * (f.type == "counter") for f in families}
    return {name for name in names if name.startswith("tandem_")}


def test_every_metric_is_on_the_page() -> None:
    names = declared() | collected()
    assert len(names) > 80
    missing = sorted(name for name in names if f"| `{name}` |" not in PAGE)
    assert not missing


def test_every_metric_of_the_page_is_declared() -> None:
    rows = re.findall(r"^\| `(tandem_\w+)` \|", PAGE, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) <= declared() | collected()


def test_no_other_source_makes_metrics_with_computed_names() -> None:
    computed = {
        str(path.relative_to(TANDEM))
        for path in TANDEM.rglob("*.py")
        if re.search(r'f"tandem_[a-z_]*\{', path.read_text())
    }
    assert computed <= FAMILIES


def test_every_literal_metric_is_on_the_page() -> None:
    calls = r'(?:counter|gauge|gauges|histogram|\w+MetricFamily)\(\s*"(tandem_\w+)"'
    sources = [path.read_text() for path in TANDEM.rglob("*.py")]
    literal = {name for source in sources for name in re.findall(calls, source)}
    assert literal <= {n.removesuffix("_total") for n in declared() | collected()}
