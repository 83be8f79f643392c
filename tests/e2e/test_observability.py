"""A running cluster as operators see it: traces, stages, logs, and a real Prometheus' view."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.router.metrics.timeline import TTFT_STAGES
from tests.harness.client import golden, open_client
from tests.harness.cluster import LocalCluster, wait_for
from tests.harness.monitoring import ALERTS, DASHBOARDS, alerts, queries
from tests.harness.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.harness.prometheus import Prometheus
from tests.harness.vllm_dashboards import GAUGES
from tests.harness.vllm_dashboards import queries as queries_of_vllm

GEN_AI_HISTOGRAMS = (
    "gen_ai.server.request.duration",
    "gen_ai.server.time_to_first_token",
    "gen_ai.server.time_per_output_token",
)
STAGES_OF = {
    "tandem-router": {"tokenize", "route", "queue"},
    "tandem-decode": {"queue", "prefill", "transfer", "first_decode", "decode"},
    "tandem-prefill": {"queue", "prefill", "transfer"},
}
NIXL_HISTOGRAMS = ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors")
NIXL_COUNTERS = ("num_failed_transfers", "num_failed_notifications", "num_kv_expired_reqs")
# Workers tell their pulls in their records, which are older than their metrics.
PULLED_ALL = (
    'sum(vllm:nixl_bytes_transferred_sum{engine="decode-0"})'
    ' >= sum(tandem_kv_bytes_pulled_total{transport="nixl",worker="decode-0"}) > 0'
)
# Alerts that a slow machine may raise, whose autoscaler only says what it would do.
MAY_FIRE = {"TandemTimeToFirstTokenHigh", "TandemInterTokenLatencyHigh", "TandemPoolTooSmall"}


@dataclass(frozen=True)
class Watched:
    cluster: LocalCluster
    receiver: OtlpReceiver
    answers: list[httpx.Response]  # to requests with a trace of their own, in `trace_ids`' order
    trace_ids: list[str]


@pytest.fixture(scope="module")
def watched(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """One prefill and one decode worker, which answered a few requests and their repetition."""
    with OtlpReceiver() as receiver:
        cluster = LocalCluster(redis_server, tmp_path_factory.mktemp("watched"))
        cluster.options = [*cluster.options, "--prefill-at", "remote", "--transport", "nixl"]
        autoscale = ("--autoscale", "dry-run", "--autoscale-interval", "1")
        cluster.router_options = [*cluster.router_options, *autoscale]
        cluster.environment = {
            **receiver.environment,
            "TANDEM_LOG_FORMAT": "json",
            "TANDEM_LOG_LEVEL": "DEBUG",
        }
        try:
            cluster.start(prefill=1, decode=1)
            answers, trace_ids = asyncio.run(_ask(cluster))
            yield Watched(cluster, receiver, answers, trace_ids)
        finally:
            cluster.close()


async def _ask(cluster: LocalCluster) -> tuple[list[httpx.Response], list[str]]:
    """Some at once, then the same: the second time their prompts are cached."""
    (short, long), _ = golden(5, 6)
    prompts = [short, long, long[100:300]]
    trace_ids = [secrets.token_hex(16) for _ in range(2 * len(prompts))]

    async def one(client: httpx.AsyncClient, prompt: list[int], trace_id: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        headers = {
            "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
            "x-tandem-timing": "1",
        }
        return await client.post("/v1/completions", json=body, headers=headers)

    async with open_client(cluster) as client:
        first = await asyncio.gather(*map(one, [client] * 3, prompts, trace_ids[:3]))
        again = await asyncio.gather(*map(one, [client] * 3, prompts, trace_ids[3:]))
    return [*first, *again], trace_ids


def by_service(spans: list[ReceivedSpan]) -> dict[str, list[ReceivedSpan]]:
    found: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        found.setdefault(span.service, []).append(span)
    return found


def outer_of(spans: list[ReceivedSpan]) -> ReceivedSpan:
    """A process' own span: that no other of it is the parent of."""
    ids = {s.span_id for s in spans}
    (outer,) = (s for s in spans if s.parent_id not in ids)
    return outer


def test_one_trace_a_request_over_router_decode_and_prefill(watched: Watched) -> None:
    def whole() -> bool:
        traces = watched.receiver.traces()
        outers = ("chat", "text_completion", "decode_worker", "prefill_worker")
        return all(
            sum(s.name.startswith(outers) for s in traces.get(t, [])) == 3
            for t in watched.trace_ids[:3]
        )

    wait_for(whole, deadline_s=20, what="whole traces")
    for trace_id in watched.trace_ids[:3]:
        services = by_service(watched.receiver.traces()[trace_id])
        assert set(services) == set(STAGES_OF)
        outer = {name: outer_of(spans) for name, spans in services.items()}
        router, decode, prefill = (outer[f"tandem-{n}"] for n in ("router", "decode", "prefill"))
        assert router.name.startswith("text_completion ")
        assert router.attributes["gen_ai.usage.output_tokens"] == 8
        assert (decode.parent_id, prefill.parent_id) == (router.span_id, decode.span_id)
        assert (decode.instance, prefill.instance) == ("decode-0", "prefill-0")
        for name, spans in services.items():
            stages = [s for s in spans if s is not outer[name]]
            assert {s.name for s in stages} == STAGES_OF[name]
            for stage in stages:
                assert stage.parent_id == outer[name].span_id
                assert outer[name].began_ns - 5e6 <= stage.began_ns <= stage.ended_ns
                assert stage.ended_ns <= outer[name].ended_ns + 5e6
        (transfer,) = (s for s in services["tandem-decode"] if s.name == "transfer")
        assert transfer.attributes["tandem.transport"] == "nixl"
        assert transfer.attributes["tandem.bytes_pulled"] > 0
    assert set(watched.receiver.traces()) == set(watched.trace_ids)


def test_metrics_have_opentelemetrys_names(watched: Watched) -> None:
    model = watched.answers[0].json()["model"]

    def are_whole() -> bool:
        found = watched.receiver.histograms
        return all(sum(h.count for h in found.get(name, ())) >= 6 for name in GEN_AI_HISTOGRAMS)

    wait_for(are_whole, deadline_s=20, what="six requests in each histogram")
    for name in GEN_AI_HISTOGRAMS:
        (histogram,) = watched.receiver.histograms[name]
        assert (histogram.service, histogram.unit) == ("tandem-router", "s")
        assert histogram.attributes["gen_ai.operation.name"] == "text_completion"
        assert histogram.attributes["gen_ai.response.model"] == model


def test_stages_sum_up_to_the_time_to_first_token(watched: Watched) -> None:
    whole: list[bool] = []
    for answer, trace_id in zip(watched.answers[:3], watched.trace_ids, strict=False):
        request_id = answer.headers["x-request-id"]
        kept = httpx.get(f"{watched.cluster.url}/v1/requests/{request_id}").json()
        assert kept["trace_id"] == trace_id
        assert (kept["decode_worker"], kept["prefill_worker"]) == ("decode-0", "prefill-0")
        stages = kept["stages_ms"]
        before = sum(stages.get(name, 0.0) for name in TTFT_STAGES)
        assert before == pytest.approx(kept["ttft_ms"], rel=0.02)
        after = stages["transfer_exposed"] + stages["first_decode"]
        assert after > 0
        whole.append(after < kept["e2e_ms"] - kept["ttft_ms"] + 20)
        header = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
        assert float(header["prefill"]) == stages["prefill"]
        assert set(header) == {*stages, "ttft", "total"}
    assert any(whole), "between two stages a busy machine may stand still, but not each time"


def test_every_process_logs_json_and_names_the_request(watched: Watched) -> None:
    request_id = watched.answers[0].headers["x-request-id"]
    lines: list[dict[str, Any]] = []
    for log in watched.cluster.folder.glob("*.log"):
        lines += (json.loads(x) for x in log.read_text().splitlines() if x.startswith("{"))
    about = {x["process"]: x for x in lines if x.get("request_id") == request_id}
    assert {
        "router-0",
        *(f"{w}-0/{part}" for w in ("decode", "prefill") for part in ("io", "engine")),
    } <= set(about)
    (ended,) = (x for x in lines if x.get("request", {}).get("id") == request_id)
    assert ended["request"]["outcome"] == "length"
    assert all(x["time"] and x["level"] and x["message"] for x in lines)


@pytest.fixture(scope="module")
def prometheus(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Starts Prometheus with the shipped rules, whose alerts fire after one second here."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "alerts.yaml"
    rules.write_text(re.sub(r"\bfor: \d+m", "for: 1s", ALERTS.read_text()))
    workers = [r["metrics_address"] for r in watched.cluster.records().values()]
    routers = [f"127.0.0.1:{watched.cluster.admin_port}"]
    targets = {"routers": routers, "workers": workers, "vllm": routers}
    with Prometheus(folder, targets, rules) as running:
        yield running


def test_a_router_and_its_workers_share_no_metric_name(watched: Watched) -> None:
    """A query without a label would count a request at the router and at its worker."""
    router = metric_names(f"{watched.cluster.admin_url}/metrics")
    for record in watched.cluster.records().values():
        worker = metric_names(f"http://{record['metrics_address']}/metrics")
        assert {name for name in router & worker if name.startswith("tandem")} == set()
        assert {name for name in router | worker if ":" in name} == set(), "a recording rule's name"


def metric_names(url: str) -> set[str]:
    text = httpx.get(url, timeout=10).text
    return {family.name for family in text_string_to_metric_families(text)}


def check_vllm_names(prometheus: Prometheus) -> None:
    """Every query of vLLM's dashboards answers, with no division by nothing."""
    wait_for(lambda: prometheus.query(PULLED_ALL), deadline_s=20, what="all pulls over NIXL")
    (series,) = prometheus.query("vllm:prompt_tokens_total")
    of = {name: series["metric"][name] for name in ("job", "instance")}
    asked = list(queries_of_vllm(**of, model=series["metric"]["model_name"]))
    now = time.time()  # of them all, however long they take
    answers = {query: prometheus.query(query, at=now) for query in asked}
    assert [query for query, found in answers.items() if not found] == []
    empty = [query for query, found in answers.items() if found[0]["value"][1] == "NaN"]
    assert empty == []
    for name in (*(f"{n}_count" for n in NIXL_HISTOGRAMS), *(f"{n}_total" for n in NIXL_COUNTERS)):
        samples = prometheus.query(f"vllm:nixl_{name}")
        engines = {s["metric"]["engine"]: float(s["value"][1]) for s in samples}
        assert set(engines) == {"decode-0", "prefill-0"}, name
        assert (engines["decode-0"] > 0) == name.endswith("_count"), name
    for name in GAUGES:
        engines = {s["metric"]["engine"] for s in prometheus.query(name)}
        assert engines == {"decode-0", "prefill-0"}, name
    by_reason = "sum by(finished_reason) (vllm:request_success_total)"
    reasons = {s["metric"]["finished_reason"]: s["value"][1] for s in prometheus.query(by_reason)}
    assert reasons == {"length": "12", "stop": "0", "abort": "0", "error": "0"}, "six, twice"
    sourced = "sum(vllm:prompt_tokens_by_source_total) == sum(vllm:prompt_tokens_total)"
    # Workers tell their counts in their records.
    wait_for(lambda: prometheus.query(sourced), deadline_s=20, what="a source of each token")
    answered = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
    assert [calls["value"][1] for calls in prometheus.query(answered)] == ["12"]


def test_dashboards_and_alerts_answer_and_an_alert_fires(
    watched: Watched, prometheus: Prometheus
) -> None:
    prometheus.wait_scrapes()
    asyncio.run(_ask(watched.cluster))
    prometheus.wait_scrapes()
    wait_for(
        lambda: all(sample["value"][1] == "1" for sample in prometheus.query("up")),
        deadline_s=30,
        what="all targets",
    )
    silent = [
        (path.stem, title, expression)
        for path in DASHBOARDS
        for title, expression in queries(path)
        if not prometheus.query(expression)
    ]
    assert silent == []
    check_vllm_names(prometheus)
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    assert set(rules) == {alert["alert"] for alert in alerts()}
    assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
    wait_for(lambda: prometheus.firing() <= MAY_FIRE, deadline_s=30, what="quiet")
    # The staged failure. It ends the module's cluster: no test may follow this one.
    watched.cluster.workers["decode-0"].kill()
    wait_for(lambda: "TandemNoDecodeWorker" in prometheus.firing(), deadline_s=30, what="the alert")
