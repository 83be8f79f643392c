"""The permissions of pods, the resources that they hold, and the network access to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tandem.common.config import router
from tests.harness.chart import (
    EXAMPLES,
    NAMESPACE,
    WITH_RAYS_HEAD,
    Object,
    component_of,
    container,
    find,
    pod_templates,
    render,
    values_of,
)

ALL = [{}, WITH_RAYS_HEAD, *map(values_of, EXAMPLES)]
by_example = pytest.mark.parametrize(
    "values", ALL, ids=["defaults", "head", *(e.stem for e in EXAMPLES)]
)
H100 = next(values_of(e) for e in EXAMPLES if e.stem == "h100-rdma")
ENDS = ("test", "keep-sizes")  # components whose pods do one thing, and listen nowhere
OUTSIDER: Object = {"namespace": "elsewhere", "labels": {"app": "anything"}}


def containers(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yields (component, the pod's spec, container), with init containers."""
    for component, pod in pod_templates(objects):
        for made in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]):
            yield component, pod["spec"], made


@by_example
def test_containers_are_confined(values: dict[str, Any]) -> None:
    for component, pod, made in containers(render(values)):
        security = made["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        rdma = component in ("prefill", "decode") and "rdma" in values.get("worker", {})
        added = ["IPC_LOCK"] if rdma else []
        assert security["capabilities"].get("add", []) == added
        assert pod["securityContext"]["runAsNonRoot"] is not rdma
        assert pod["automountServiceAccountToken"] is False


@by_example
def test_containers_say_what_they_need(values: dict[str, Any]) -> None:
    """A namespace with a quota refuses a pod whose containers do not."""
    for component, _, made in containers(render(values)):
        if made["name"] != "model":  # copies the model and ends; the image is the user's
            assert {"cpu", "memory"} <= made["resources"]["requests"].keys(), component
            assert "memory" in made["resources"]["limits"], component


@by_example
def test_probes_start_no_program_and_are_patient(values: dict[str, Any]) -> None:
    """A program takes seconds to start on a busy node, and a failed probe then ends a container
    that is well. Containers that Ray runs in need probes, or KubeRay adds its own."""
    for component, _, made in containers(render(values)):
        probes = {k: made[k] for k in made if k.endswith("Probe")}
        for name, probe in probes.items():
            assert len({"httpGet", "tcpSocket", "grpc"} & probe.keys()) == 1, (component, name)
            assert "exec" not in probe
            assert probe["timeoutSeconds"] >= 5, (component, name)
            assert probe["failureThreshold"] >= 3
            if name == "livenessProbe":
                assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
                # What hangs for a minute does not drain: no wait for its grace period.
                assert probe["terminationGracePeriodSeconds"] <= 15
        # Redis behind its TLS port listens at a Unix socket, which no probe reaches.
        has_port = component != "redis" or "ports" in made
        ends = component in ENDS or made["name"] in ("model", "ray-certificate")
        if not ends and has_port:
            assert "livenessProbe" in probes, (component, made["name"])


@by_example
def test_rays_memory_monitor_is_off(values: dict[str, Any]) -> None:
    """It ends processes that Ray started, which are small here, until memory is free."""
    for _, _, made in containers(render(values)):
        if made["name"] in ("ray", "ray-head"):
            assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in made["env"]


@by_example
def test_what_is_mounted_is_there(values: dict[str, Any]) -> None:
    for component, pod, made in containers(render(values)):
        volumes = {v["name"] for v in pod.get("volumes", [])}
        mounts = [m["mountPath"] for m in made.get("volumeMounts", [])]
        assert {m["name"] for m in made.get("volumeMounts", [])} <= volumes
        assert len(mounts) == len(set(mounts))
        # Redis behind its TLS port listens at a Unix socket, which no probe reaches.
        has_port = component != "redis" or "ports" in made
        if component != "test" and made["name"] != "model" and has_port:
            assert "/tmp" in mounts  # the root is read-only


@by_example
def test_secrets_come_by_reference(values: dict[str, Any]) -> None:
    """Each that a pod names is made here, or named by the values; no value is in a pod."""
    objects = render(values)
    made = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "Secret"}
    given = str(values)
    for _, pod, each in containers(objects):
        for entry in each.get("env", []):
            match entry.get("valueFrom"):
                case {"secretKeyRef": {"name": name, "key": key}}:
                    assert key in made[name] if name in made else name in given
        for secret in made.values():
            for value in secret.values():
                assert value not in str(pod)


def test_existing_secrets_are_used_and_none_is_made() -> None:
    existing = {"existingSecret": "mine", "key": "a-key"}
    objects = render(
        {
            "apiKeys": {**existing, "textsSecret": "mine"},
            "clusterToken": existing,
            "redis": {"builtin": {"password": existing, "workerPassword": existing}},
            "tls": {
                "internal": {
                    "existingSecrets": {"router": "mine", "worker": "mine", "redis": "mine"}
                }
            },
            "ray": {
                **WITH_RAYS_HEAD["ray"],
                "token": existing,
                "authority": {"existingSecret": "mine"},
            },
        }
    )
    assert not [o for o in objects if o["kind"] == "Secret"]
    references = [
        e["valueFrom"]["secretKeyRef"]
        for _, _, each in containers(objects)
        for e in each.get("env", [])
        if "secretKeyRef" in e.get("valueFrom", {})
    ]
    # Router, gRPC replica, two workers and Redis: two each; the head and the test: one each.
    assert len(references) == 12
    assert {r["name"] for r in references} == {"mine"}
    assert sorted(r["key"] for r in references) == ["a-key"] * 11 + ["user"]


def test_external_redis_by_url_with_its_authority() -> None:
    objects = render(H100)
    assert not [o for o in objects if component_of(o) == "redis"]
    for component in ("router", "prefill", "decode"):
        made = container(objects, component)
        (url,) = (e for e in made["env"] if e["name"] == "TANDEM_REDIS_URL")
        assert url["valueFrom"]["secretKeyRef"] == {"name": "tandem-redis-url", "key": "url"}
        assert "/etc/tandem/redis" in [m["mountPath"] for m in made["volumeMounts"]]


def test_kinds_may_have_their_own_urls_of_an_external_redis() -> None:
    external = {"urlSecret": {"name": "own"}, "workerUrlSecret": {"name": "less", "key": "u"}}
    redis = {"builtin": {"enabled": False}, "external": external}
    for component, told in (
        ("router", {"name": "own", "key": "url"}),
        ("decode", {"name": "less", "key": "u"}),
        ("prefill", {"name": "less", "key": "u"}),
    ):
        made = container(render({"redis": redis}), component)
        (url,) = [v for v in made["env"] if v["name"] == "TANDEM_REDIS_URL"]
        assert url["valueFrom"] == {"secretKeyRef": told}


def test_devices_are_limits_and_pools_spread() -> None:
    objects = render(H100)
    for pool in ("prefill", "decode"):
        stateful = find(objects, "StatefulSet", pool)["spec"]
        assert stateful["podManagementPolicy"] == "Parallel"
        spec = stateful["template"]["spec"]
        (worker,) = spec["containers"]
        assert worker["resources"]["limits"] == {
            "cpu": "8",
            "memory": "64Gi",
            "nvidia.com/gpu": 1,
            "rdma/hca_shared": 1,
            "hugepages-2Mi": "2Gi",
        }
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == stateful["selector"]["matchLabels"]
        assert spec["priorityClassName"] == "serving"
    scaler = find(objects, "HorizontalPodAutoscaler", "decode")["spec"]["scaleTargetRef"]
    assert scaler == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "demo-tandem-decode"}


@pytest.mark.parametrize(("count", "ranks", "limit"), [(1, 4, 4), (8, 4, 8), (0, 4, None)])
def test_each_rank_of_a_worker_gets_a_gpu(count: int, ranks: int, limit: int | None) -> None:
    values = {"decode": {"gpu": {"count": count}, "options": {"tensorParallel": ranks}}}
    worker = container(render(values), "decode")
    assert worker["resources"]["limits"].get("nvidia.com/gpu") == limit


def test_a_revision_is_of_hub_models_alone() -> None:
    hub = {"name": "org/llama", "revision": "0123abc"}
    for source, given in (("hub", ["0123abc"]), ("builtin", [])):
        objects = render({"model": {"source": source, "hub": hub}})
        for component in ("router", "prefill", "decode"):
            arguments = container(objects, component)["args"]
            options = pairwise(arguments)
            assert [value for name, value in options if name == "--model-revision"] == given


def test_a_model_comes_from_where_it_is_said_to() -> None:
    def model(**values: Any) -> tuple[str, Object]:
        objects = render({"model": values})
        spec = find(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]
        arguments = spec["containers"][0]["args"]
        volume = [v for v in spec["volumes"] if v["name"] == "model"]
        return arguments[arguments.index("--model") + 1], volume[0] if volume else {}

    claim = {"claimName": "models", "path": "a/llama.gguf"}
    image = {"reference": "models/llama:1", "path": "/weights/llama"}
    assert model(source="builtin") == ("smollm2", {})
    assert model(source="hub", hub={"name": "org/llama"}) == ("org/llama", {})
    path, volume = model(source="pvc", pvc=claim)
    assert path == "/model/a/llama.gguf"
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    path, volume = model(source="image", image=image)
    assert path == "/model/weights/llama"
    assert volume["image"]["reference"] == "models/llama:1"
    path, volume = model(source="image", image={**image, "mount": "copy"})
    assert path == "/model/llama"
    assert "emptyDir" in volume


def _has_token(volume: Object) -> bool:
    sources = volume.get("projected", {}).get("sources", [])
    return any("serviceAccountToken" in source for source in sources)


@by_example
def test_only_a_router_that_scales_has_a_token_and_only_its_container(
    values: dict[str, Any],
) -> None:
    """The token is that of the scaler's account, at the path that
    tandem/common/config/router.py names. Kubernetes' own automount stays off, because init
    containers would get the token too."""
    objects = render(values)
    with_token = set()
    for component, pod, made in containers(objects):
        assert pod["automountServiceAccountToken"] is False
        assert component in ("router", "keep-sizes") or "serviceAccountName" not in pod
        (volume,) = [v for v in pod.get("volumes", []) if _has_token(v)] or [None]
        mounts = [m for m in made.get("volumeMounts", []) if volume and m["name"] == volume["name"]]
        if not mounts:
            continue
        assert volume
        with_token.add((component, made["name"]))
        account = "scaler" if component == "router" else component
        assert mounts == [
            {"name": volume["name"], "mountPath": router.SERVICE_ACCOUNT, "readOnly": True}
        ]
        assert (
            pod["serviceAccountName"]
            == find(objects, "ServiceAccount", account)["metadata"]["name"]
        )
        sources = {k: v for source in volume["projected"]["sources"] for k, v in source.items()}
        assert sources["serviceAccountToken"]["path"] == "token"
        files = {item["path"] for k in ("configMap", "downwardAPI") for item in sources[k]["items"]}
        assert files == {"ca.crt", "namespace"}
    scales = "--scale-objects" in container(objects, "router")["args"]
    with_token.remove(("keep-sizes", "keep-sizes"))  # the Job before an upgrade
    assert with_token == ({("router", "router")} if scales else set())
    assert scales is ("rayCluster" not in values and "keda" not in str(values))


def test_nothing_keeps_routers_from_the_api_server() -> None:
    for made in render():
        if made["kind"] == "NetworkPolicy":
            assert made["spec"]["policyTypes"] == ["Ingress"]


def test_the_scaler_may_scale_and_nothing_else() -> None:
    rules = find(render(), "Role", "scaler")["rules"]
    assert {(r, n) for rule in rules for r in rule["resources"] for n in rule["resourceNames"]} == {
        ("statefulsets/scale", "demo-tandem-prefill"),
        ("statefulsets/scale", "demo-tandem-decode"),
        ("deployments/scale", "demo-tandem-router"),
    }
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "patch", "update"}


@pytest.mark.parametrize(
    ("replicas", "most", "least"),
    [(4, 1, 3), (1, 1, 0), (0, 1, 0), (2, 5, 0), (4, "25%", 3), (5, "25%", 3), (1, "100%", 0)],
)
def test_workers_of_a_ray_cluster_can_be_evicted(
    replicas: int, most: int | str, least: int
) -> None:
    """Kubernetes asks the pods' owner for its scale to count maxUnavailable, or a share, from; a
    RayCluster has none, and no eviction would be allowed. A number of pods needs no owner."""
    decode = {"replicas": replicas, "podDisruptionBudget": {"maxUnavailable": most}}
    objects = render({"decode": decode, "rayCluster": {"enabled": True}})
    budget = find(objects, "PodDisruptionBudget", "decode")["spec"]
    assert budget["minAvailable"] == least
    assert "maxUnavailable" not in budget
    assert find(objects, "PodDisruptionBudget", "router")["spec"]["maxUnavailable"] == 1
    budget = find(render({"decode": decode}), "PodDisruptionBudget", "decode")["spec"]
    assert budget["maxUnavailable"] == most


def reachable(objects: list[Object], component: str, source: Object) -> set[Any]:
    """Ports of a component that a pod may reach: names; "*" for every one."""
    policies = [o for o in objects if o["kind"] == "NetworkPolicy" and component_of(o) == component]
    if not policies:
        return {"*"}
    found: set[Any] = set()
    for rule in (rule for p in policies for rule in p["spec"].get("ingress", [])):
        if "from" not in rule or any(_matches(peer, source) for peer in rule["from"]):
            found |= {p["port"] for p in rule["ports"]} if "ports" in rule else {"*"}
    return found


def _matches(peer: Object, source: Object) -> bool:
    space = peer.get("namespaceSelector")
    if space is None and source["namespace"] != NAMESPACE:
        return False
    if space is not None:
        wanted = space.get("matchLabels", {})
        if not wanted.items() <= {"kubernetes.io/metadata.name": source["namespace"]}.items():
            return False
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    return bool(labels.items() <= source["labels"].items())


@by_example
def test_internal_ports_are_closed_to_others(values: dict[str, Any]) -> None:
    objects = render(values)
    pods = dict(pod_templates(objects))
    inside = {
        component: {"namespace": NAMESPACE, "labels": pod["metadata"]["labels"]}
        for component, pod in pods.items()
    }
    # The routers' clients and the scrapers are named.
    guarded = "clients" in values.get("networkPolicy", {})
    for component in pods:
        if component in ENDS:
            continue
        outside = reachable(objects, component, OUTSIDER)
        if component in ("router", "grpc"):
            scraped = {"admin"} if "monitoring" in values else set()
            public = {"http" if component == "router" else "grpc"}
            assert outside == (set() if guarded else public | scraped)
        elif component in ("prefill", "decode"):
            assert outside == (set() if guarded else {"metrics"})
            assert "grpc" in reachable(objects, component, inside["router"])
            assert "*" in reachable(objects, component, inside["decode"])  # NIXL's are free-chosen
        else:
            assert outside == set()
    assert {"http"} <= reachable(objects, "router", inside["test"])
    # Keys that changed, and commands in a router's container.
    for component in ("router", "grpc"):
        assert {"http", "admin", "admin-grpc"} <= reachable(objects, component, inside["router"])
    for component in ("prefill", "decode"):
        assert "grpc" in reachable(objects, component, inside["grpc"])
    if "redis" in pods:
        for component in ("router", "grpc", "prefill", "decode"):
            assert reachable(objects, "redis", inside[component]) == {"redis"}
    if guarded:
        prometheus = {"namespace": "monitoring", "labels": {}}
        assert reachable(objects, "decode", prometheus) == {"metrics"}
        assert reachable(objects, "router", prometheus) == {"admin"}  # where its metrics are


def test_clients_alone_reach_the_router_where_no_scraper_is_named() -> None:
    objects = render({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": "b"}}}]}})
    assert reachable(objects, "router", OUTSIDER) == set()
    client: Object = {"namespace": NAMESPACE, "labels": {"a": "b"}}
    assert reachable(objects, "router", client) == {"http"}
    assert reachable(objects, "grpc", OUTSIDER) == set()
    assert reachable(objects, "grpc", client) == {"grpc"}


def test_operators_reach_the_admin_ports_where_they_are_named() -> None:
    operator: Object = {"namespace": "ops", "labels": {"team": "platform"}}
    peer = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"team": "platform"}}}
    objects = render({"networkPolicy": {"admins": [peer], "clients": [{"podSelector": {}}]}})
    assert reachable(objects, "router", operator) == {"admin", "admin-grpc"}
    assert reachable(objects, "router", OUTSIDER) == set()
