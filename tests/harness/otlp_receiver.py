"""A real OTLP receiver: OpenTelemetry's services for traces (gRPC and HTTP) and metrics (gRPC). It
stores what it receives."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_pb_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass(frozen=True)
class ReceivedHistogram:
    service: str
    unit: str
    count: int
    sum: float
    bounds: tuple[float, ...]
    attributes: dict[str, Any]


class _Metrics(metrics_pb_grpc.MetricsServiceServicer):
    """Stores the newest histograms by name; they are cumulative."""

    def __init__(self) -> None:
        self.newest: dict[str, list[ReceivedHistogram]] = {}

    def Export(  # noqa: N802
        self, request: metrics_pb.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_pb.ExportMetricsServiceResponse:
        for of_resource in request.resource_metrics:
            service = _values(of_resource.resource.attributes)["service.name"]
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    self.newest[metric.name] = [
                        ReceivedHistogram(
                            service=service,
                            unit=metric.unit,
                            count=point.count,
                            sum=point.sum,
                            bounds=tuple(point.explicit_bounds),
                            attributes=_values(point.attributes),
                        )
                        for point in metric.histogram.data_points
                    ]
        return metrics_pb.ExportMetricsServiceResponse()


class OtlpReceiver(pb_grpc.TraceServiceServicer):
    """A receiver with all received `spans`. `endpoint` (gRPC) or `http_endpoint` is the value for
    OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._metrics = _Metrics()
        self._server = grpc.server(ThreadPoolExecutor(2))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_pb_grpc.add_MetricsServiceServicer_to_server(self._metrics, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._http_server = ThreadingHTTPServer(("127.0.0.1", 0), _http_handler(self))
        self.http_endpoint = f"http://127.0.0.1:{self._http_server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        self._server.start()
        threading.Thread(target=self._http_server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0)
        self._http_server.shutdown()
        self._http_server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that exports to this receiver at short intervals."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }

    @property
    def histograms(self) -> dict[str, list[ReceivedHistogram]]:
        """The newest histograms by name, one for each set of attributes."""
        return dict(self._metrics.newest)

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        found: dict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in list(self.spans):
            found[span.trace_id].append(span)
        return dict(found)

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext | None
    ) -> pb.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            name=span.name,
                            service=resource["service.name"],
                            instance=resource["service.instance.id"],
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            began_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes=_values(span.attributes),
                            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                    )
        return pb.ExportTraceServiceResponse()


def _http_handler(receiver: OtlpReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if (self.path, self.headers["content-type"]) != (
                "/v1/traces",
                "application/x-protobuf",
            ):
                self.send_error(404)
                return
            receiver.Export(pb.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
