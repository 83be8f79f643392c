"""Dashboards by Grafana's own types, alert rules by promtool, and both as the chart ships them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from jsonschema import Draft202012Validator

from tests.harness.chart import CHART, component_of, find, render
from tests.harness.monitoring import ALERTS, DASHBOARDS, alerts, dashboard, panels
from tests.harness.prometheus import program

REPOSITORY = CHART.parents[1]
RULE_TESTS = REPOSITORY / "tests" / "data" / "alert_tests.yaml"


def unknown_fields(given: Any, known: Any, path: str = "") -> list[str]:
    """Returns the paths of fields in `given` that Grafana's types do not know."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [
            wrong
            for name, value in given.items()
            for wrong in (
                unknown_fields(value, known[name], f"{path}/{name}")
                if name in known
                else [f"{path}/{name}"]
            )
        ]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        pairs = enumerate(zip(given, known, strict=True))
        return [wrong for n, (a, b) in pairs for wrong in unknown_fields(a, b, f"{path}/{n}")]
    return [] if given == known else [path]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_is_one_by_grafanas_types(path: Path) -> None:
    given = dashboard(path)
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert unknown_fields(given, known) == []
    assert given["uid"] == path.stem
    ids = [p["id"] for p in given["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in given["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells
    titles = [p["title"] for p in panels(path)]
    assert len(titles) == len(set(titles))


def test_each_alert_says_what_to_do_and_has_its_line_in_the_runbook() -> None:
    runbook = (REPOSITORY / "docs" / "operations.md").read_text()
    for alert in alerts():
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert f"| `{alert['alert']}` |" in runbook


def test_promtool_passes_the_rules_and_their_tests() -> None:
    """Each alert fires when it should, and at no other time (tests/data/alert_tests.yaml)."""
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(RULE_TESTS)]):
        done = subprocess.run(
            [program("promtool"), *command], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = set()
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        silent, fires = test["promql_expr_test"]
        assert f'alertname="{test["name"]}"' in silent["expr"] == fires["expr"]
        assert fires["exp_samples"] == [{"value": 1}]
        assert silent["exp_samples"] == []
        tested.add(test["name"])
    assert tested == {alert["alert"] for alert in alerts()}


def test_the_chart_ships_both_on_request() -> None:
    assert not [o for o in render() if o["kind"] == "PrometheusRule"]
    labels = {"release": "prometheus"}
    objects = render({"monitoring": {"rules": True, "dashboards": True, "labels": labels}})
    rule = find(objects, "PrometheusRule", "alerts")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert labels.items() <= rule["metadata"]["labels"].items()
    held = find(objects, "ConfigMap", "dashboards")
    assert held["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in held["data"].items()} == {
        path.name: dashboard(path) for path in DASHBOARDS
    }


@pytest.mark.parametrize("gateway", [False, True])
def test_vllms_names_are_a_job_of_their_own_at_what_serves_requests(gateway: bool) -> None:
    monitoring = {"serviceMonitors": True, "interval": "30s"}
    values = {"monitoring": monitoring, "gateway": {"enabled": gateway}}
    tls = {"router": {"tls": {"secretName": "public"}}}
    before = [o for o in render(values | tls) if o["kind"] == "ServiceMonitor"]
    assert "vllm" not in str(before)
    monitoring["vllmNames"] = True
    objects = [o for o in render(values | tls) if o["kind"] == "ServiceMonitor"]
    schema = json.loads((RULE_TESTS.parent / "custom_resources/servicemonitor.json").read_text())
    for made in objects:
        Draft202012Validator(schema).validate(made)
        (was,) = (o for o in before if o["metadata"] == made["metadata"])
        endpoints = made["spec"]["endpoints"]
        serves = component_of(made) in ("router-admin", "grpc-admin")
        if serves or (gateway and component_of(made) == "decode"):
            *endpoints, named = endpoints
            assert named.pop("params") == {"names": ["vllm"]}
            job = {"targetLabel": "job", "replacement": "demo-tandem-as-vllm"}
            assert named.pop("relabelings") == [job]
            assert named == endpoints[-1]  # the same port, key and certificate
        assert endpoints == was["spec"]["endpoints"]


def test_tracing_and_json_logs_reach_every_process() -> None:
    tracing = {"endpoint": "http://collector:4317", "sampleRatio": 0.1}
    objects = render({"tracing": tracing, "logFormat": "json"})
    for name in ("router", "prefill", "decode"):
        (pod,) = (
            o["spec"]["template"]["spec"]
            for o in objects
            if o["kind"] in ("Deployment", "StatefulSet")
            and o["metadata"]["labels"]["app.kubernetes.io/component"] == name
        )
        found = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
        assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
        assert found["OTEL_TRACES_SAMPLER_ARG"] == "0.1"
        assert found["TANDEM_LOG_FORMAT"] == "json"
    plain = {
        e["name"]
        for o in render()
        if o["kind"] == "Deployment"
        for e in o["spec"]["template"]["spec"]["containers"][0].get("env", [])
    }
    assert not any(name.startswith("OTEL") for name in plain)
