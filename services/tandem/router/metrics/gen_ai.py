"""The router's metrics under OpenTelemetry's names for generative AI servers, sent over OTLP.

    Metric (in seconds)                    Measured for
    gen_ai.server.request.duration         every request
    gen_ai.server.time_to_first_token      successful requests
    gen_ai.server.time_per_output_token    successful requests: mean over the tokens after the first
The metrics are off, and OpenTelemetry's SDK is not loaded, unless OpenTelemetry's environment
variables enable them (observability/otlp.py). Names, attributes and buckets follow OpenTelemetry's
semantic conventions, "Generative AI metrics".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry.metrics import MeterProvider, NoOpMeterProvider

from tandem.net.observability.otlp import (
    close_within,
    is_enabled,
    make_resource,
    needs_sdk,
    protocol,
)
from tandem.router.metrics.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter


class EndedRequest(Protocol):
    """The fields of a `RequestRecord` that metrics need when the request has ended."""

    kind: str
    model: str
    outcome: str
    error: str
    timeline: Timeline
    e2e_s: float | None
    num_sent: int
    facts: dict[str, Any]


_OPERATIONS = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}
_DURATION_S = tuple(0.01 * 2**power for power in range(14))
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def operation_of(kind: str) -> str:
    """Returns the value of the attribute `gen_ai.operation.name` for a kind of request."""
    return _OPERATIONS[kind]


class GenAiMetrics:
    """One router's histograms. With OpenTelemetry's no-op provider, the histograms do nothing."""

    def __init__(self, provider: MeterProvider, sdk: SdkMeterProvider | None = None) -> None:
        self._sdk = sdk
        meter = provider.get_meter("tandem")
        self._duration_s = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time from the checked request to its end",
            explicit_bucket_boundaries_advisory=_DURATION_S,
        )
        self._ttft_s = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from the checked request to its first token",
            explicit_bucket_boundaries_advisory=_TTFT_S,
        )
        self._tpot_s = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time between the tokens of a request after its first token",
            explicit_bucket_boundaries_advisory=_TPOT_S,
        )

    def on_end(self, record: EndedRequest) -> None:
        """Records a request that has ended, whatever its outcome."""
        if self._sdk is None:
            return
        attributes = {
            "gen_ai.operation.name": operation_of(record.kind),
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
        }
        timeline = record.timeline
        is_well = record.outcome in ("stop", "length")
        of_all = attributes if is_well else {**attributes, "error.type": record.outcome}
        assert record.e2e_s is not None
        self._duration_s.record(record.e2e_s, of_all)
        if not is_well or timeline.ttft_s is None:
            return
        self._ttft_s.record(timeline.ttft_s, attributes)
        if timeline.num_tokens > 1:
            decode_s = timeline.last_token_s - timeline.began_s - timeline.ttft_s
            self._tpot_s.record(decode_s / (timeline.num_tokens - 1), attributes)

    def close(self) -> None:
        """Sends the remaining data, and gives up after a deadline."""
        if self._sdk is not None:
            close_within(self._sdk.shutdown)


NO_GEN_AI_METRICS = GenAiMetrics(NoOpMeterProvider())


def make_gen_ai_metrics(service: str, instance: str) -> GenAiMetrics:
    """Creates the metrics if the environment enables them, else the no-op metrics.

    Raises ConfigError if the metrics are enabled but OpenTelemetry's SDK is not installed.
    `service` and `instance` name the process in the exported data (`make_resource`).
    """
    if not is_enabled("METRICS"):
        return NO_GEN_AI_METRICS
    with needs_sdk("metrics"):
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        provider = SdkMeterProvider(
            [PeriodicExportingMetricReader(_exporter())],
            make_resource(service, instance),
            shutdown_on_exit=False,
        )
        return GenAiMetrics(provider, provider)


def _exporter() -> MetricExporter:
    if protocol("METRICS") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http import metric_exporter as over_http

    return over_http.OTLPMetricExporter()
