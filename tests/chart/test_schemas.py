"""Every object of every example, against Helm's strict lint and the schemas of Kubernetes.

Custom resources are checked against tests/data/custom_resources: schemas of our own, of what the
chart may use of them, after the definitions that KubeRay 1.6, the Prometheus Operator and the
Gateway API publish. A pod inside one is checked as Kubernetes' own PodTemplate.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
from helm_python.chart import lint
from jsonschema import Draft202012Validator

from tests.harness.chart import (
    CHART,
    EXAMPLES,
    WITH_RAYS_HEAD,
    component_of,
    notes,
    pod_templates,
    render,
    values_of,
)

# It would read some megabytes of schemas for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

VERSIONS = ("1.31", "1.34", "1.36")
SINCE = {"h100-dra": "1.34"}  # the first version that serves what an example needs
CUSTOM = Path(__file__).parents[1] / "data" / "custom_resources"
ALL = [None, *EXAMPLES]


def name_of(example: Path | None) -> str:
    return example.stem if example else "defaults"


@cache
def custom_schema(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((CUSTOM / f"{kind.lower()}.json").read_text()))


def check(made: dict[str, Any], version: str) -> None:
    if (CUSTOM / f"{made['kind'].lower()}.json").exists():
        custom_schema(made["kind"]).validate(made)
    else:
        kubernetes_validate.validate(made, version, strict=True)


def cases() -> list[Any]:
    """Each example with each version of Kubernetes that it is for."""
    return [
        pytest.param(example, version, id=f"{name_of(example)}-{version}")
        for example in ALL
        for version in VERSIONS
        if version >= SINCE.get(name_of(example), "")
    ]


@pytest.mark.parametrize(("example", "version"), cases())
def test_is_valid(example: Path | None, version: str) -> None:
    report = lint(CHART, values_of(example), strict=True, kube_version=f"v{version}.0")
    assert not report["errors"]
    assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []
    objects = render(values_of(example))
    for made in objects:
        check(made, version)
    clusters = [made for made in objects if made["kind"] == "RayCluster"]
    for component, pod in pod_templates(clusters):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": component}}
        template["template"] = {k: pod[k] for k in ("metadata", "spec")}
        kubernetes_validate.validate(template, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_rays_head_is_valid(version: str) -> None:
    found = [o for o in render(WITH_RAYS_HEAD) if component_of(o) == "ray-head"]
    assert {o["kind"] for o in found} == {"Deployment", "Service", "NetworkPolicy"}
    for made in found:
        check(made, version)


@pytest.mark.parametrize("example", ALL, ids=name_of)
def test_names_and_labels(example: Path | None) -> None:
    """Objects meet no other's name, and what selects pods selects those of one component."""
    objects = render(values_of(example))
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(objects)]
    for made in objects:
        spec = made.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels") or (selector if made["kind"] == "Service" else {})
        if labels:
            found = [p for p in pods if labels.items() <= p.items()]
            assert len(found) <= 1, (made["kind"], made["metadata"]["name"])
            assert found or made["kind"] == "ServiceMonitor"


@pytest.mark.parametrize("example", ALL, ids=name_of)
def test_notes_have_three_commands_for_objects_that_exist(example: Path | None) -> None:
    text = notes(values_of(example))
    names = {(o["kind"].lower(), o["metadata"]["name"]) for o in render(values_of(example))}
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3."]
    assert ("service", "demo-tandem-router") in names
    assert "service/demo-tandem-router 8000:" in text
    if "statefulset " in text:
        assert "statefulset demo-tandem-decode --replicas" in text
        assert ("statefulset", "demo-tandem-decode") in names


def test_a_wrong_field_of_a_custom_resource_is_seen() -> None:
    """The schemas can refuse: they are of this repository."""
    kuberay = next(e for e in EXAMPLES if e.stem == "kuberay")
    (cluster,) = (o for o in render(values_of(kuberay)) if o["kind"] == "RayCluster")
    custom_schema("RayCluster").validate(cluster)
    for path, value in (
        (("spec", "workerGroupSpecs", 0, "replica"), 1),
        (("spec", "workerGroupSpecs", 0, "replicas"), "1"),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "authOptions", "mode"), "password"),
    ):
        broken = copy.deepcopy(cluster)
        inner = broken
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        assert list(custom_schema("RayCluster").iter_errors(broken)), path
