"""The chart makes an InferencePool, its picker, and fronts in decode pods if it is told to."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.harness.chart import EXAMPLES, command_line, container, find, render, values_of
from tests.harness.programs import parse_router

VALUES = values_of(next(e for e in EXAMPLES if e.stem == "gateway"))


def pods(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    kind = "Deployment" if component == "picker" else "StatefulSet"
    return find(objects, kind, component)["spec"]["template"]


def test_the_pool_selects_fronts_and_names_the_picker() -> None:
    objects = render(VALUES)
    (pool,) = (o for o in objects if o["kind"] == "InferencePool")
    labels = pods(objects, "decode")["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    front = container(objects, "decode", "front")
    port = next(p["containerPort"] for p in front["ports"] if p["name"] == "http")
    assert pool["spec"]["targetPorts"] == [{"number": port}]
    service = find(objects, "Service", "picker")
    ref = pool["spec"]["endpointPickerRef"]
    assert ref["name"] == service["metadata"]["name"]
    assert ref["port"]["number"] == service["spec"]["ports"][0]["port"]
    assert ref["failureMode"] == "FailOpen"


def test_command_lines_are_the_programs() -> None:
    objects = render(VALUES)
    pod = {"POD_NAME": "demo-tandem-decode-1", "POD_IP": "10.0.0.7"}
    front = parse_router(command_line(container(objects, "decode", "front"), pod))
    worker = command_line(container(objects, "decode", "worker"), pod)
    assert front.gateway.front_of == worker[worker.index("--worker-id") + 1]
    assert (front.host, front.api, front.http_port) == ("0.0.0.0", "http", 8000)
    assert front.drain_deadline_s == float(worker[worker.index("--drain-deadline") + 1])
    made = container(objects, "picker")
    picker = parse_router(command_line(made, pod))
    port = next(p["containerPort"] for p in made["ports"] if p["name"] == "picker")
    assert picker.gateway.picker_address() == ("0.0.0.0", port)
    told = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "InferenceObjective"}
    assert picker.gateway.objectives == {name: spec["priority"] for name, spec in told.items()}
    assert {spec["poolRef"]["name"] for spec in told.values()} == {"demo-tandem"}


def test_objectives_are_of_the_group_that_has_them_since_version_1_6() -> None:
    objectives = [o for o in render(VALUES) if o["kind"] == "InferenceObjective"]
    assert {o["apiVersion"] for o in objectives} == {"llm-d.ai/v1alpha2"}


def test_a_front_has_a_routers_certificate_and_keys() -> None:
    objects = render(VALUES)
    pod = pods(objects, "decode")["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    front = container(objects, "decode", "front")
    mounts = {mount["mountPath"]: mount["name"] for mount in front["volumeMounts"]}
    assert set(mounts.values()) <= volumes.keys()
    secret = volumes[mounts["/etc/tandem/tls"]]["projected"]["sources"][0]["secret"]["name"]
    assert secret == "demo-tandem-tls-router"
    assert volumes[mounts["/etc/tandem/keys"]]["secret"]["secretName"] == "demo-tandem-key-records"


def test_off_by_default() -> None:
    objects = render()
    assert not any(o["kind"].startswith("Inference") for o in objects)
    assert [c["name"] for c in pods(objects, "decode")["spec"]["containers"]] == ["worker"]


def test_gateways_alone_reach_picker_and_fronts() -> None:
    objects = render(VALUES)
    gateways = VALUES["networkPolicy"]["gateways"]
    for component, port in (("picker", "picker"), ("decode", "http")):
        policy = find(
            [o for o in objects if "Ingress" in o.get("spec", {}).get("policyTypes", ())],
            "NetworkPolicy",
            component,
        )
        (rule,) = (r for r in policy["spec"]["ingress"] if {"port": port} in r.get("ports", ()))
        assert [peer for peer in rule["from"] if "namespaceSelector" in peer] == gateways


def test_a_ray_cluster_has_no_fronts() -> None:
    with pytest.raises(HelmError, match=r"gateway\.enabled and rayCluster\.enabled"):
        render({"gateway": {"enabled": True}, "rayCluster": {"enabled": True}})


def test_metrics_of_pickers_and_fronts_are_scraped() -> None:
    """All requests pass through fronts: without their metrics, dashboards and alerts are empty."""
    values = {**VALUES, "monitoring": {"serviceMonitors": True}}
    objects = render(values)
    for component in ("picker", "decode"):
        monitor = find(objects, "ServiceMonitor", component)["spec"]
        (endpoint,) = (e for e in monitor["endpoints"] if e["port"] == "admin")
        assert endpoint["authorization"]["credentials"]["key"] == "metrics"
        service = find(objects, "Service", component)
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        (port,) = (p for p in service["spec"]["ports"] if p["name"] == "admin")
        made = container(objects, component, "front" if component == "decode" else "picker")
        assert {"name": "admin", "containerPort": port["port"]} in made["ports"]
        policies = [o for o in objects if "Ingress" in o.get("spec", {}).get("policyTypes", ())]
        rules = find(policies, "NetworkPolicy", component)["spec"]["ingress"]
        assert {"ports": [{"port": "admin"}], "from": [{"namespaceSelector": {}}]} in rules
    without = render({"monitoring": {"serviceMonitors": True}})
    assert [e["port"] for e in find(without, "ServiceMonitor", "decode")["spec"]["endpoints"]] == [
        "metrics"
    ]
