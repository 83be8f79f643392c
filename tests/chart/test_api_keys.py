"""The API keys that the chart generates: their form, who gets which, and who is let in by them."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec
import pytest

from tandem.net.security.key_ring import KeyRing
from tandem.net.security.keys import KeyRecord
from tests.harness.chart import (
    NAMESPACE,
    RELEASE,
    Object,
    chart,
    command_line,
    component_of,
    container,
    find,
    load_objects,
    notes,
    render,
)
from tests.harness.programs import parse_router

RECORDS = "demo-tandem-key-records"
TEXTS = "demo-tandem-api-keys"
MONITORED = {"monitoring": {"serviceMonitors": True}}


def secrets(objects: list[Object]) -> dict[str, dict[str, bytes]]:
    """Returns the decoded data of each Secret, by its name."""
    return {
        o["metadata"]["name"]: {k: base64.b64decode(v) for k, v in o["data"].items()}
        for o in objects
        if o["kind"] == "Secret"
    }


def router_options(values: dict[str, Any]) -> Any:
    made = container(render(values), "router")
    return parse_router(command_line(made, {"POD_NAME": "router-0", "POD_IP": "10.0.0.8"}))


def router_pod(objects: list[Object]) -> Object:
    return dict(find(objects, "Deployment", "router")["spec"]["template"]["spec"])


def test_routers_take_the_generated_records_and_their_texts_open_what_they_should() -> None:
    made = secrets(render())
    records = msgspec.json.decode(made[RECORDS]["keys.json"], type=list[KeyRecord])
    ring = KeyRing()
    now = time.time()
    ring.merge(records, now=now)
    ring.synced_at = now
    assert set(made[TEXTS]) == {"operator", "metrics", "user"}
    for role, text in made[TEXTS].items():
        record = ring.authenticate(text.decode(), now=now)
        assert (record.role, record.version) == (role, 1)
        assert now - 60 < record.created_at <= now
        secret = text.rpartition(b"-")[2]
        assert len(secret) == 43  # 256 bits
        assert secret not in made[RECORDS]["keys.json"]
    assert len({r.tenant for r in records}) == 3


def test_each_installation_has_keys_of_its_own() -> None:
    assert secrets(render())[TEXTS] != secrets(render())[TEXTS]


def test_routers_mount_the_records_alone_and_let_nobody_in_without_a_key() -> None:
    objects = render()
    pod = router_pod(objects)
    assert {"name": "keys", "secret": {"secretName": RECORDS}} in pod["volumes"]
    assert TEXTS not in str(pod)
    given = router_options({})
    assert given.keys_file == "/etc/tandem/keys/keys.json"
    assert not given.allow_anonymous


def test_helm_test_and_prometheus_have_the_smallest_key_that_does() -> None:
    objects = render(MONITORED)
    (key,) = (e for e in container(objects, "test")["env"] if e["name"] == "TANDEM_API_KEY")
    assert key["valueFrom"]["secretKeyRef"] == {"name": TEXTS, "key": "user"}
    endpoints = {
        component_of(o): o["spec"]["endpoints"][0] for o in objects if o["kind"] == "ServiceMonitor"
    }
    assert endpoints["router-admin"]["port"] == "admin"
    assert endpoints["router-admin"]["authorization"] == {
        "credentials": {"name": TEXTS, "key": "metrics"}
    }
    assert "authorization" not in endpoints["decode"]
    secured = render({**MONITORED, "router": {"tls": {"secretName": "public"}}})
    monitor = find(secured, "ServiceMonitor", "router-admin")["spec"]["endpoints"][0]
    assert monitor["scheme"] == "https"  # the admin ports have the public certificate
    selected = find(objects, "ServiceMonitor", "router-admin")["spec"]["selector"]["matchLabels"]
    service = find(objects, "Service", "router-admin")
    assert selected.items() <= service["metadata"]["labels"].items()
    assert {p["name"] for p in service["spec"]["ports"]} == {"admin", "admin-grpc"}


def test_no_route_leads_to_the_admin_ports() -> None:
    routes = {"parentRefs": [{"name": "public"}], "enabled": True}
    objects = render(
        {
            "router": {
                "ingress": {"enabled": True},
                "gateway": {
                    "http": {**routes, "hostnames": ["a.example"]},
                    "grpc": {**routes, "hostnames": ["b.example"]},
                },
            }
        }
    )
    leading = [o for o in objects if o["kind"] in ("Ingress", "HTTPRoute", "GRPCRoute")]
    assert len(leading) == 3
    assert not [o for o in leading if "admin" in str(o) or "8002" in str(o) or "8003" in str(o)]
    for component, name in (("router", "http"), ("grpc", "grpc")):
        public = find(objects, "Service", component)
        (port,) = public["spec"]["ports"]
        assert port["name"] == name
        (route,) = (o for o in leading if o["kind"] == f"{name.upper()}Route")
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend == {"name": public["metadata"]["name"], "port": port["port"]}


def test_keys_of_ones_own_replace_the_generated_ones() -> None:
    own = {"existingSecret": "records", "key": "a.json", "textsSecret": "texts"}
    objects = render({"apiKeys": own, **MONITORED})
    assert not {RECORDS, TEXTS} & set(secrets(objects))
    assert {"name": "keys", "secret": {"secretName": "records"}} in router_pod(objects)["volumes"]
    assert router_options({"apiKeys": own}).keys_file == "/etc/tandem/keys/a.json"
    monitor = find(objects, "ServiceMonitor", "router-admin")["spec"]["endpoints"][0]
    assert monitor["authorization"]["credentials"]["name"] == "texts"
    without = render({"apiKeys": {"existingSecret": "records"}, **MONITORED})
    assert "TANDEM_API_KEY" not in str(container(without, "test")["env"])
    assert "authorization" not in str(find(without, "ServiceMonitor", "router-admin"))


def test_an_anonymous_release_has_no_keys() -> None:
    values = {"apiKeys": {"allowAnonymous": True}}
    objects = render(values)
    assert not {RECORDS, TEXTS} & set(secrets(objects))
    given = router_options(values)
    assert (given.allow_anonymous, given.keys_file) == (True, "")
    assert "get secret" not in notes(values)


@pytest.mark.parametrize("key", ["user", "operator"])
def test_the_notes_say_how_to_read_a_key(key: str) -> None:
    assert f"get secret {TEXTS} -o jsonpath='{{.data.{key}}}' | base64 -d" in notes()


def test_an_upgrade_without_a_cluster_says_new_keys() -> None:
    """`helm template` finds nothing by `lookup`: whoever installs by it names Secrets of their own.

    With a cluster an upgrade finds the Secrets; deploy/kind.sh checks that.
    """
    rendered = chart().render({}, name=RELEASE, namespace=NAMESPACE, is_upgrade=True)
    assert secrets(load_objects(rendered))[TEXTS] != secrets(render())[TEXTS]
