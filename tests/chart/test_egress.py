"""Egress policies limit what routers and workers may reach, where they are on."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmError

from tests.harness.chart import (
    NAMESPACE,
    WITH_RAYS_HEAD,
    Object,
    component_of,
    pod_templates,
    render,
)

ANY: list[Object] = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
API_SERVER: list[Object] = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
REDIS: list[Object] = [{"ipBlock": {"cidr": "10.0.0.2/32"}}]
COLLECTOR: Object = {"to": [{"ipBlock": {"cidr": "10.0.0.3/32"}}], "ports": [{"port": 4317}]}
EXTERNAL_REDIS = {"builtin": {"enabled": False}, "external": {"urlSecret": {"name": "redis"}}}
POOLS = ("prefill", "decode")


def with_egress(values: dict[str, Any] | None = None, **egress: object) -> dict[str, Any]:
    named = {"enabled": True, "apiServer": API_SERVER} | egress
    return {**(values or {}), "networkPolicy": {"egress": named}}


def rules(objects: list[Object], component: str) -> list[Object]:
    """The egress rules of the component's one policy for it."""
    (policy,) = (
        o
        for o in objects
        if o["kind"] == "NetworkPolicy"
        and component_of(o) == component
        and "Egress" in o["spec"]["policyTypes"]
    )
    assert policy["spec"]["policyTypes"] == ["Egress"]
    return list(policy["spec"]["egress"])


def reached(objects: list[Object], component: str, target: str) -> set[Any]:
    """Ports of the target's pods that the component may reach; "*" for every one."""
    (pod,) = (pod for name, pod in pod_templates(objects) if name == target)
    found: set[Any] = set()
    for rule in rules(objects, component):
        for peer in rule.get("to", []):
            wanted = peer.get("podSelector", {}).get("matchLabels")
            if wanted and wanted.items() <= pod["metadata"]["labels"].items():
                found |= {p["port"] for p in rule["ports"]} if "ports" in rule else {"*"}
    return found


def blocks(objects: list[Object], component: str) -> list[tuple[str, Any]]:
    """Addresses outside the release, with their ports; "*" for every address or port."""
    return [
        (peer.get("ipBlock", {}).get("cidr", ""), port["port"])
        for rule in rules(objects, component)
        for peer in rule.get("to", [{"ipBlock": {"cidr": "*"}}])
        for port in rule.get("ports", [{"port": "*"}])
        if "ipBlock" in peer
    ]


def test_no_policy_is_on_by_default() -> None:
    policies = [o for o in render() if o["kind"] == "NetworkPolicy"]
    assert policies
    assert all(o["spec"]["policyTypes"] == ["Ingress"] for o in policies)


def test_the_switch_of_all_policies_holds_for_egress() -> None:
    values = with_egress()
    values["networkPolicy"]["enabled"] = False
    assert not [o for o in render(values) if o["kind"] == "NetworkPolicy"]


def test_routers_reach_workers_redis_dns_and_the_api_server_alone() -> None:
    objects = render(with_egress())
    assert all(reached(objects, "router", pool) == {"grpc"} for pool in POOLS)
    assert reached(objects, "router", "redis") == {"redis"}
    assert reached(objects, "router", "router") == {"http", "admin"}
    assert reached(objects, "router", "grpc") == {"http", "admin"}
    assert all(reached(objects, "grpc", pool) == {"grpc"} for pool in POOLS)
    assert reached(objects, "grpc", "redis") == {"redis"}
    assert reached(objects, "grpc", "router") == set()
    assert blocks(objects, "grpc") == [("*", 53), ("*", 53)]
    assert blocks(objects, "router") == [("*", 53), ("*", 53), ("10.0.0.1/32", "*")]


@pytest.mark.parametrize("component", POOLS)
def test_workers_reach_one_another_redis_and_dns_alone(component: str) -> None:
    objects = render(with_egress())
    assert all(reached(objects, component, pool) == {"*"} for pool in POOLS)
    assert reached(objects, component, "redis") == {"redis"}
    assert reached(objects, component, "router") == set()
    assert blocks(objects, component) == [("*", 53), ("*", 53)]


def test_ports_of_rules_exist_in_the_pods_that_they_name() -> None:
    objects = render(with_egress())
    pods = dict(pod_templates(objects))
    for component in ("router", "grpc", *POOLS):
        for target in (*POOLS, "redis", "grpc"):
            ports = {
                port["name"]
                for made in pods[target]["spec"]["containers"]
                for port in made.get("ports", [])
            }
            assert reached(objects, component, target) <= ports | {"*"}


@pytest.mark.parametrize("component", ["router", *POOLS])
def test_nobody_reaches_a_head_that_runs_no_workers(component: str) -> None:
    assert reached(render(with_egress(WITH_RAYS_HEAD)), component, "ray-head") == set()


def test_workers_of_a_ray_cluster_reach_its_head() -> None:
    objects = render(with_egress({"rayCluster": {"enabled": True}}, apiServer=[]))
    assert reached(objects, "decode", "ray-head") == {"*"}
    assert reached(objects, "router", "ray-head") == set()


@pytest.mark.parametrize(
    ("values", "key", "peers", "port"),
    [
        ({"redis": EXTERNAL_REDIS}, "redis", REDIS, "*"),
        ({"model": {"source": "hub", "hub": {"name": "a/b"}}}, "hub", ANY, 443),
        ({"tracing": {"endpoint": "http://10.0.0.3:4317"}}, "more", [COLLECTOR], 4317),
    ],
    ids=["external Redis", "hub", "collector"],
)
def test_an_address_that_is_needed_has_to_be_named(
    values: dict[str, Any], key: str, peers: list[Object], port: object
) -> None:
    with pytest.raises(HelmError, match=rf"networkPolicy\.egress\.{key}"):
        render(with_egress(values))
    objects = render(with_egress(values, **{key: peers}))
    cidr = (peers[0].get("to") or peers)[0]["ipBlock"]["cidr"]
    for component in ("router", *POOLS):
        assert (cidr, port) in blocks(objects, component)


def test_the_api_server_has_to_be_named_where_routers_scale_pools() -> None:
    with pytest.raises(HelmError, match=r"networkPolicy\.egress\.apiServer"):
        render(with_egress(apiServer=[]))
    fixed = render(with_egress({"router": {"scalesPools": False}}, apiServer=API_SERVER))
    assert blocks(fixed, "router") == [("*", 53), ("*", 53)]


def test_dns_can_be_narrowed() -> None:
    dns: list[Object] = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    ]
    objects = render(with_egress(dns=dns))
    assert NAMESPACE != "kube-system"
    for component in ("router", *POOLS):
        assert rules(objects, component)[0] == {
            "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
            "to": dns,
        }
