"""Devices of workers by claims (DRA), and pods of the two pools near each other."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.harness.chart import (
    EXAMPLES,
    Object,
    component_of,
    find,
    pod_templates,
    render,
    values_of,
)

DRA = next(values_of(e) for e in EXAMPLES if e.stem == "h100-dra")
POOLS = ("prefill", "decode")
NO_KEYS = {"tls": {"internal": {"enabled": False}}}  # making them takes seconds
SPEC: Object = {"devices": {"requests": [{"name": "a", "exactly": {"deviceClassName": "b"}}]}}


def claims(values: dict[str, Any], pool: str) -> tuple[Object, list[Object]]:
    """The pod of a pool, and the templates of claims that the chart makes for it."""
    objects = render(NO_KEYS | values)
    (pod,) = (pod["spec"] for name, pod in pod_templates(objects) if name == pool)
    made = [o for o in objects if o["kind"] == "ResourceClaimTemplate" and component_of(o) == pool]
    return pod, made


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("by_ray", [False, True])
def test_each_pod_claims_its_devices_and_only_the_worker_gets_them(pool: str, by_ray: bool) -> None:
    pod, (template,) = claims({**DRA, "rayCluster": {"enabled": by_ray}}, pool)
    assert template["spec"] == {"spec": DRA["worker"]["resourceClaims"][0]["spec"]}
    name = template["metadata"]["name"]
    assert pod["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": name}]
    for made in pod["containers"]:
        wanted = [{"name": "devices"}] if made["name"] == "worker" else None
        assert made["resources"].get("claims") == wanted
        assert "nvidia.com/gpu" not in made["resources"]["limits"]
    (worker,) = (made for made in pod["containers"] if made["name"] == "worker")
    assert worker["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_a_template_with_another_spec_has_another_name() -> None:
    """Nobody may change the spec of one that is there."""
    names = set()
    for count in (1, 2, 2):
        spec: Object = {"devices": {"requests": [{"name": "a", "exactly": {"count": count}}]}}
        _, (made,) = claims({"worker": {"resourceClaims": [{"name": "a", "spec": spec}]}}, "decode")
        names.add(made["metadata"]["name"])
    assert len(names) == 2


def test_a_template_of_ones_own_is_used() -> None:
    values = {"decode": {"resourceClaims": [{"name": "gpu", "template": "mine"}]}}
    pod, made = claims(values, "decode")
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "mine"}]
    assert not made
    assert "resourceClaims" not in claims(values, "prefill")[0]


@pytest.mark.parametrize(
    "claim", [{"name": "a"}, {"name": "a", "spec": SPEC, "template": "b"}, {"spec": SPEC}]
)
def test_a_claim_has_a_name_and_either_a_spec_or_a_template(claim: dict[str, Any]) -> None:
    with pytest.raises(HelmError, match="resourceClaims"):
        render({"worker": {"resourceClaims": [claim]}})


def test_pods_prefer_nodes_that_are_near_the_other_pool() -> None:
    """They only prefer them: each pool would wait for the first pod of the other one."""
    objects = render(DRA)
    for pool, other in (POOLS, POOLS[::-1]):
        stateful = find(objects, "StatefulSet", pool)["spec"]["template"]["spec"]
        (wish,) = stateful["affinity"]["podAffinity"].pop(
            "preferredDuringSchedulingIgnoredDuringExecution"
        )
        assert stateful["affinity"] == {"podAffinity": {}}
        assert wish["podAffinityTerm"]["topologyKey"] == "topology.example.com/rack"
        selected = wish["podAffinityTerm"]["labelSelector"]["matchLabels"]
        pods = find(objects, "StatefulSet", other)["spec"]["template"]["metadata"]["labels"]
        assert selected.items() <= pods.items()


def test_that_wish_adds_to_an_affinity_of_ones_own() -> None:
    term = {"weight": 5, "podAffinityTerm": {"topologyKey": "zone"}}
    own = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
        },
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]},
    }
    near = {"affinity": own, "nearPeers": {"topologyKey": "rack"}}
    pod, _ = claims({"decode": near}, "decode")
    assert pod["affinity"]["nodeAffinity"] == own["nodeAffinity"]
    first, second = pod["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert (first, second["podAffinityTerm"]["topologyKey"]) == (term, "rack")
    assert "affinity" not in claims({"decode": near}, "prefill")[0]
