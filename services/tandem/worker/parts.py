"""The components that all services of a worker use."""

from dataclasses import dataclass

from tandem.common.config.worker import WorkerConfig
from tandem.net.observability.traces import NO_TRACING, Tracing
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.rates import Rates


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """One worker's settings, engine link, rates, metrics and tracing."""

    config: WorkerConfig
    link: EngineLink
    rates: Rates
    metrics: WorkerMetrics
    tracing: Tracing = NO_TRACING
