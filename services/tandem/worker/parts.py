"""The parts of a worker that all its services stand on."""

from dataclasses import dataclass

from tandem.common.config.worker import WorkerConfig
from tandem.net.observability.traces import NO_TRACING, Tracing
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.metrics.worker import WorkerMetrics
from tandem.worker.peers.rates import Rates


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """One worker's settings, its engine, and what is measured and told of it."""

    config: WorkerConfig
    link: EngineLink
    rates: Rates
    metrics: WorkerMetrics
    tracing: Tracing = NO_TRACING
