"""The pool of encode workers in the chart: absent by default, and beside the others if it has a
size."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.harness.chart import component_of, find, render

ENCODE: dict[str, Any] = {"encode": {"replicas": 2}}


def components(kind: str, values: dict[str, Any]) -> set[str]:
    return {component_of(found) for found in render(values) if found["kind"] == kind}


def test_there_is_none_by_default() -> None:
    for values in ({}, {"encode": None}):
        assert components("StatefulSet", values) == {"prefill", "decode"}


def test_it_has_the_objects_of_a_pool() -> None:
    values = ENCODE | {"worker": {"sizeOwner": "other"}}
    found = find(render(values), "StatefulSet", "encode")
    assert found["spec"]["replicas"] == 2, "the other pools' owner of the size does not count"
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["--role", "encode"]
    for kind in ("Service", "PodDisruptionBudget"):
        assert "encode" in components(kind, values)


def test_workers_may_reach_it_and_routers_may_set_its_size() -> None:
    objects = render(ENCODE | {"networkPolicy": {"enabled": True}})
    policy = find(objects, "NetworkPolicy", "encode")
    (workers,) = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    names = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in workers["from"]
    }
    assert {"prefill", "decode"} <= names
    router = find(objects, "Deployment", "router")
    args = router["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "encode=statefulsets/demo-tandem-encode" in args[args.index("--scale-objects") + 1]
    role = find(objects, "Role", "scaler")
    assert "demo-tandem-encode" in role["rules"][0]["resourceNames"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rayCluster": {"enabled": True}}, "no group of encode workers"),
        ({"encode": {"replicas": 1, "sizeOwner": "keda"}}, "encode.sizeOwner is keda"),
        (
            {"worker": {"options": {"tensorParallel": 2}}},
            "tensorParallel of decode is 2, and several ranks compute no images",
        ),
        (
            {"prefill": {"options": {"tensorParallel": 2}}},
            "tensorParallel of prefill is 2, and several ranks compute no images",
        ),
        (
            {"worker": {"options": {"kernels": "triton"}}},
            "kernels of decode is triton, and the Triton kernels compute no images",
        ),
    ],
)
def test_what_it_cannot_have_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(HelmError, match=says):
        render(ENCODE | values)
