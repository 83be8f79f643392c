"""A router's metrics under vLLM's names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.common.cached_tokens import CachedTokens
from tandem.common.engine_counts import EngineTally, NixlCounts
from tandem.common.worker_load import WorkerLoad
from tandem.router.metrics.router import Metrics
from tandem.router.metrics.vllm_names import VllmMetrics
from tests.harness.vllm_dashboards import DASHBOARDS, expressions, queries, stock


def record(worker_id: str = "decode-0") -> Any:
    tally = EngineTally()
    for num_tokens in (1, 8, 9, 20_000):
        tally.add_step(num_tokens)
    tally.add_prompt(100, CachedTokens(device=32, disk=16, peer=16))
    tally.add_preemptions(2)
    tally.speculation.count(4, 3)
    tally.speculation.count(3, 1)
    tally.nixl.add_pull(seconds=0.03, post_s=0.0005, num_bytes=3_000, num_blocks=11)
    tally.nixl.add_pull(seconds=6.0, post_s=0.002, num_bytes=2**40, num_blocks=60_000)
    tally.nixl.add_failed()
    for _ in range(2):
        tally.nixl.add_unconfirmed()
    for _ in range(3):
        tally.nixl.add_expired()
    return Record(worker_id, tally)


class Record:
    """The part of a worker's record that the metrics read."""

    def __init__(self, worker_id: str, tally: EngineTally) -> None:
        self.worker_id = worker_id
        self.counts = tally.counts
        self.load = WorkerLoad(num_waiting=3, num_pulls=1)


def exposed(
    metrics: Metrics, workers: Sequence[Any] = ()
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, as a Prometheus reads them."""
    named = VllmMetrics(metrics.registry, workers or [record()], "m")
    text = generate_latest(named).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def of(samples: list[tuple[dict[str, str], float]], label: str) -> dict[str, float]:
    assert all(labels["model_name"] == "m" for labels, _ in samples)
    return {labels[label]: value for labels, value in samples}


def test_every_metric_of_vllms_dashboards_is_exposed() -> None:
    metrics = Metrics()
    metrics.http_requests.labels(method="GET", handler="/v1/models", status="2xx").inc()
    metrics.http_request_duration_s.labels(method="GET", handler="/v1/models").observe(1)
    asked = {n for q in queries("j", "i", "m") for n in re.findall(r"(?:vllm:|http_)\w+", q)}
    # Workers of the cluster view make these.
    of_workers = {f"vllm:{n}" for n in ("num_requests_running", "num_requests_waiting")}
    assert asked - set(exposed(metrics)) == of_workers | {"vllm:kv_cache_usage_perc"}


def test_no_expression_of_a_dashboard_in_vllms_sources_is_left_out() -> None:
    if not (sources := os.environ.get("VLLM_SOURCES", "")):
        pytest.skip("VLLM_SOURCES names no sources of vLLM")
    found = {
        str(path.relative_to(sources)): list(
            dict.fromkeys(expressions(json.loads(path.read_text())))
        )
        for path in sorted(Path(sources, DASHBOARDS).rglob("*.json"))
    }
    assert found == stock()


def test_the_stock_dashboards_are_whole() -> None:
    """Each has so many expressions in vLLM 0.33.0."""
    assert [len(found) for found in stock().values()] == [21, 14, 32]


def test_requests_by_reason_are_vllms() -> None:
    metrics = Metrics()
    told = {"stop": 3, "cancelled": 2, "worker_lost": 1, "deadline_exceeded": 1, "queue_full": 9}
    for outcome, number in told.items():
        metrics.requests.labels(kind="chat", outcome=outcome).inc(number)
    finished = of(exposed(metrics)["vllm:request_success_total"], "finished_reason")
    assert finished == {"stop": 3, "length": 0, "abort": 2, "error": 2}


def test_what_an_engine_counts_is_exposed_under_its_worker() -> None:
    found = exposed(Metrics())
    for name, value in {
        "num_preemptions_total": 2,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 32,
        "external_prefix_cache_queries_total": 68,
        "external_prefix_cache_hits_total": 32,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 7,
        "spec_decode_num_accepted_tokens_total": 4,
        "iteration_tokens_total_count": 4,
        "iteration_tokens_total_sum": 20_018,
    }.items():
        assert of(found[f"vllm:{name}"], "engine") == {"decode-0": value}, name
    sources = of(found["vllm:prompt_tokens_by_source_total"], "source")
    assert sources == {"local_compute": 36, "local_cache_hit": 32, "external_kv_transfer": 32}
    waiting = of(found["vllm:num_requests_waiting_by_reason"], "reason")
    assert waiting == {"capacity": 3, "deferred": 1}
    accepted = of(found["vllm:spec_decode_num_accepted_tokens_per_pos_total"], "position")
    assert accepted == {"0": 2, "1": 1, "2": 1, "3": 0}
    steps = of(found["vllm:iteration_tokens_total_bucket"], "le")
    assert [steps[bound] for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [1, 2, 3, 3, 4]


def test_pulls_over_nixl_have_vllms_names() -> None:
    found = exposed(Metrics())
    for name, value in {
        "xfer_time_seconds_count": 2,
        "xfer_time_seconds_sum": 6.03,
        "post_time_seconds_sum": 0.0025,
        "bytes_transferred_sum": 3_000 + 2**40,
        "num_descriptors_sum": 60_011,
        "num_failed_transfers_total": 1,
        "num_failed_notifications_total": 2,
        "num_kv_expired_reqs_total": 3,
    }.items():
        assert of(found[f"vllm:nixl_{name}"], "engine") == {"decode-0": value}, name
    for name, bounds in {
        "xfer_time_seconds": {"0.025": 0, "0.05": 1, "5.0": 1, "+Inf": 2},
        "post_time_seconds": {"0.001": 1, "0.005": 2, "+Inf": 2},
        "bytes_transferred": {"2048.0": 0, "8192.0": 1, "8.589934592e+09": 1, "+Inf": 2},
        "num_descriptors": {"10.0": 0, "20.0": 1, "50000.0": 1, "+Inf": 2},
    }.items():
        buckets = of(found[f"vllm:nixl_{name}_bucket"], "le")
        assert {bound: buckets[bound] for bound in bounds} == bounds, name


def test_a_worker_with_other_buckets_has_no_histogram() -> None:
    """A worker of another version may have them; the scrape of all others would fail with it."""
    old = record("decode-1")
    new = record()
    old.counts = msgspec.structs.replace(old.counts, steps=(1, 2), nixl=NixlCounts())
    found = exposed(Metrics(), [old, new])
    for name in ("iteration_tokens_total_count", "nixl_xfer_time_seconds_count"):
        assert set(of(found[f"vllm:{name}"], "engine")) == {"decode-0"}
    failed = of(found["vllm:nixl_num_failed_transfers_total"], "engine")
    assert failed == {"decode-0": 1, "decode-1": 0}


@pytest.mark.parametrize("name", ["http_requests_total", "http_request_duration_seconds_count"])
def test_calls_have_no_model(name: str) -> None:
    metrics = Metrics()
    metrics.http_requests.labels(method="GET", handler="/v1/models", status="2xx").inc()
    metrics.http_request_duration_s.labels(method="GET", handler="/v1/models").observe(1)
    ((labels, value),) = exposed(metrics)[name]
    assert labels.items() >= {"method": "GET", "handler": "/v1/models"}.items()
    assert "model_name" not in labels
    assert value == 1
