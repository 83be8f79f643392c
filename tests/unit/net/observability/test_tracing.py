from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tandem.errors import ConfigError
from tandem.net.observability import otlp
from tandem.net.observability.traces import NO_SPAN, NO_TRACING, make_tracing
from tests.harness.cluster import wait_for
from tests.harness.otlp_receiver import OtlpReceiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


def test_off_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert make_tracing("tandem-router", "r") is NO_TRACING
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    span = NO_TRACING.begin("chat", headers, {})
    assert span is NO_SPAN
    assert span.headers == {}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracing("tandem-router", "r") is NO_TRACING


def test_off_loads_no_sdk() -> None:
    code = (
        "import sys; from tandem.net.observability.traces import make_tracing;"
        "make_tracing('a', 'b');"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_stages_are_children_and_headers_make_the_next_process_one(receiver: OtlpReceiver) -> None:
    router = make_tracing("tandem-router", "router-0")
    worker = make_tracing("tandem-decode", "decode-0")
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
    outer = router.begin("chat tiny", headers, {"gen_ai.operation.name": "chat"})
    assert outer.trace_id == TRACE_ID
    assert outer.headers["tracestate"] == "vendor=1"
    inner = worker.begin("decode_worker", outer.headers, {})
    now = time.monotonic()
    inner.stage("queue", now - 2, now - 1, {"n": 3})
    inner.stage("prefill", now - 1, 0.0)  # it did not come to its end
    inner.end(error="worker_lost")
    outer.end({"gen_ai.usage.output_tokens": 7})
    wait_for(lambda: len(receiver.spans) == 3, deadline_s=10, what="three spans")
    by_name = {s.name: s for s in receiver.spans}
    chat, decode, queue = (by_name[n] for n in ("chat tiny", "decode_worker", "queue"))
    assert {s.trace_id for s in receiver.spans} == {TRACE_ID}
    assert (chat.parent_id, decode.parent_id) == (SPAN_ID, chat.span_id)
    assert queue.parent_id == decode.span_id
    assert (chat.service, chat.instance) == ("tandem-router", "router-0")
    assert chat.attributes == {"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 7}
    assert decode.is_error
    assert decode.attributes["error.type"] == "worker_lost"
    assert abs(queue.ended_ns - queue.began_ns - 1e9) < 1e3
    assert abs(time.time_ns() - 1e9 - queue.ended_ns) < 5e9


def test_a_client_that_does_not_sample_is_heeded(receiver: OtlpReceiver) -> None:
    router = make_tracing("tandem-router", "router-0")
    span = router.begin("chat", {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}, {})
    assert span.trace_id == ""
    assert span.headers["traceparent"].endswith("-00")
    span.stage("queue", 1.0, 2.0)
    span.end()
    last = router.begin("sampled", {"traceparent": "not one"}, {})
    last.end()
    wait_for(lambda: receiver.spans, deadline_s=10, what="a span")
    assert [s.name for s in receiver.spans] == ["sampled"]


def test_a_collector_that_is_gone_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    lost = make_tracing("tandem-router", "r")
    lost.begin("chat", {}, {}).end()
    began = time.monotonic()
    lost.close()
    assert time.monotonic() - began < 10  # unbounded it would be 30


def test_what_is_left_is_sent_at_the_end(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    kept = make_tracing("tandem-router", "r")
    kept.begin("chat", {}, {}).end()
    kept.close()
    assert [s.name for s in receiver.spans] == ["chat"]


def test_over_http_and_under_a_name_of_ones_own(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.http_endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    router = make_tracing("tandem-router", "r")
    router.begin("chat", {}, {}).end()
    router.close()
    assert [(s.name, s.service) for s in receiver.spans] == [("chat", "chat-backend")]


def test_the_standard_sampler_is_heeded(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    router = make_tracing("tandem-router", "r")
    router.begin("left out", {}, {}).end()
    asked = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    router.begin("asked for", asked, {}).end()
    router.close()
    assert [s.name for s in receiver.spans] == ["asked for"]


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        make_tracing("tandem-router", "r")
