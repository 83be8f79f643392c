from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.errors import ConfigError, ContextTooLong
from tandem.router.metrics.gen_ai import NO_GEN_AI_METRICS, make_gen_ai_metrics
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.log import RequestRecord
from tests.harness.otlp_receiver import OtlpReceiver

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def ended(kind: str, *tokens_at: float, error: bool = False) -> RequestRecord:
    """A request whose tokens came so many seconds after it began."""
    timeline = Timeline()
    for at in tokens_at:
        timeline.note_tokens(timeline.began_s + at)
    record = RequestRecord("r", kind, timeline, model="tiny")
    record.outcome = "stop"
    if error:
        record.fail(ContextTooLong("too long"))
    record.end()
    return record


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"},
        {ENDPOINT: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_off(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert make_gen_ai_metrics("tandem-router", "r") is NO_GEN_AI_METRICS


def test_off_loads_no_sdk() -> None:
    code = (
        "import sys; from tandem.router.metrics.gen_ai import make_gen_ai_metrics as make;"
        "make('a', 'b');"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_what_is_left_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.endpoint)
        metrics = make_gen_ai_metrics("tandem-router", "router-0")
        for record in (ended("chat", 0.5, 0.6, 0.8), ended("chat", 0.1), ended("chat", error=True)):
            metrics.on_end(record)
        metrics.close()
        found = receiver.histograms
    of_all = found["gen_ai.server.request.duration"]
    assert {h.attributes.get("error.type"): h.count for h in of_all} == {
        None: 2,
        "context_length_exceeded": 1,
    }
    (ttft,) = found["gen_ai.server.time_to_first_token"]
    assert (ttft.count, ttft.sum, ttft.unit) == (2, pytest.approx(0.6), "s")
    assert ttft.bounds[0] == 0.001
    assert ttft.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
    }
    (tpot,) = found["gen_ai.server.time_per_output_token"]
    assert (tpot.count, tpot.sum) == (1, pytest.approx(0.15))


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        make_gen_ai_metrics("tandem-router", "r")
