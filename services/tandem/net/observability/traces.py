"""OpenTelemetry traces: one trace for each request, across router, decode and prefill worker.

Tracing is off unless OpenTelemetry's environment variables turn it on (otlp.py). While tracing is
off, the SDK is not loaded, and every request has the span `NO_SPAN`, which records nothing. If
tracing is on, OpenTelemetry's variables set protocol, headers, sampler, limits and names.

A process calls `begin` when it receives a request, `stage` when a stage of the request has ended,
and `end` at the end of the request. When a process sends the request to another process, it also
sends the `headers` of its span (W3C Trace Context). The span in the other process then becomes a
child of this span: the decode worker's span is a child of the router's span. Times are
`time.monotonic()` seconds.

A thread sends the spans from a queue of limited size. If the collector is slow or missing, spans
are lost, but requests are not delayed.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.net.observability.otlp import (
    close_within,
    is_enabled,
    make_resource,
    needs_sdk,
    protocol,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Attributes = Mapping[str, str | int | float | bool]
_NONE: Attributes = {}
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of a request in one process.

    `headers` must be sent with the request to the next process, so that the span of the next
    process becomes a child of this span. `trace_id` has 32 hexadecimal digits. `headers` and
    `trace_id` are empty if the request is not traced.
    """

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._unix_ns = time.time_ns() - time.monotonic_ns()
        self.headers: dict[str, str] = {}
        _PROPAGATOR.inject(self.headers, self._context)
        self.trace_id = f"{span.get_span_context().trace_id:032x}" if span.is_recording() else ""

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes = _NONE
    ) -> None:
        """Adds a span for a stage that has ended. Does nothing if one of the times is 0, which
        means that the request did not reach the stage."""
        if not (began_s and ended_s and self.trace_id):
            return
        span = self._tracer.start_span(
            name, self._context, attributes=dict(attributes), start_time=self._ns(began_s)
        )
        span.end(self._ns(ended_s))

    def end(self, attributes: Attributes = _NONE, *, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _ns(self, seconds: float) -> int:
        return self._unix_ns + round(seconds * 1e9)


NO_SPAN = RequestSpan(NoOpTracer(), INVALID_SPAN)


class Tracing:
    """The tracing of one process. Without a provider, tracing is off."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem") if provider is not None else NoOpTracer()

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> RequestSpan:
        """Starts a span. If `headers` has a trace context, the new span becomes a child of the span
        in this context."""
        if self._provider is None:
            return NO_SPAN
        parent = _PROPAGATOR.extract(headers)
        own = dict(attributes)
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=own)
        return RequestSpan(self._tracer, span)

    def close(self) -> None:
        """Sends the remaining spans. Returns after at most CLOSE_S seconds."""
        if self._provider is not None:
            close_within(self._provider.shutdown)


NO_TRACING = Tracing()


def make_tracing(service: str, instance: str) -> Tracing:
    """Creates the tracing of a process from the environment variables. Raises ConfigError if the
    variables turn tracing on but the SDK is not installed.

    `service` and `instance` name the process (`make_resource`).
    """
    if not is_enabled("TRACES"):
        return NO_TRACING
    with needs_sdk("traces"):
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Without this option the SDK waits half a minute at exit if no collector answers.
        provider = TracerProvider(resource=make_resource(service, instance), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
        return Tracing(provider)


def _exporter() -> SpanExporter:
    if protocol("TRACES") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    return over_http.OTLPSpanExporter()
