"""Values that are wrong are refused by name; those that are left out are the program's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import yaml
from helm_python import HelmError

from tandem.common.config import cluster, engine, transfer
from tandem.common.options import to_text
from tandem.common.units import parse_size
from tests.harness.chart import (
    EXAMPLES,
    chart,
    command_line,
    component_of,
    container,
    find,
    options,
    pod_templates,
    render,
    values_of,
    worker_command,
)
from tests.harness.programs import parse_router, parse_worker, program_defaults

# Set by the chart itself, from what it knows of the pod.
CHART_SETS = {
    "worker": {
        *(
            "role",
            "group",
            "model",
            "model-revision",
            "model-impl",
            "worker-id",
            "host",
            "port",
            "metrics-port",
        ),
        "start-deadline",
        "tls-dir",
    },
    "router": {
        *(
            "model",
            "more-models",
            "group",
            "model-revision",
            "model-impl",
            "served-model-name",
            "host",
            "api",
            "http-port",
            "grpc-port",
            "router-id",
            "admin-host",
            "admin-port",
            "admin-grpc-port",
            "allow-anonymous",
            "keys-file",
            "tls-dir",
            "tls-cert",
            "tls-key",
        ),
        "scale-objects",
        *("endpoint-picker", "picker-fallbacks", "picker-stays", "objectives", "front-of"),
    },
}
# For tests and measurements, or, as cores, not an operator's choice inside a container.
CHART_LEAVES = {
    "cores",
    "transfer-delay",
    "transfer-bandwidth",
    "overlap",
    "ranks-share-gpu",
    "ranks-own-pools",
}
ALL = [{}, *map(values_of, EXAMPLES)]
GATEWAY = next(e for e in EXAMPLES if e.stem == "gateway")


def kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() or c.isdigit() else c for c in name)


@pytest.mark.parametrize("program", ["worker", "router"])
def test_defaults_are_the_programs(program: str) -> None:
    mirrored = {kebab(k): v for k, v in chart().values[program]["options"].items()}
    left_out = CHART_SETS[program] | CHART_LEAVES
    defaults = {k: v for k, v in program_defaults(program).items() if k not in left_out}
    assert mirrored.keys() == defaults.keys()
    for name, value in mirrored.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert value == float(defaults[name]), name
        else:
            assert to_text(value) == defaults[name], name


def test_choices_are_the_programs() -> None:
    schema = chart().schema
    assert schema
    properties = schema["$defs"]["options"]["properties"]
    for name, allowed in (
        ("device", engine.Device),
        ("dtype", engine.Dtype),
        ("kvDtype", engine.KvDtype),
        ("numerics", engine.Numerics),
        ("kernels", engine.Kernels),
        ("weights", engine.WeightFormat),
        ("transport", transfer.Transport),
        ("prefillAt", transfer.PrefillAt),
        ("verifyBlocks", transfer.VerifyBlocks),
    ):
        assert properties[name]["enum"] == list(get_args(allowed)), name


def test_environment_has_what_every_process_needs() -> None:
    for component in ("router", "prefill", "decode"):
        names = {e["name"] for e in container(render(), component)["env"]}
        needed = {
            cluster.CLUSTER_ID_VARIABLE,
            cluster.REDIS_URL_VARIABLE,
            cluster.TOKEN_VARIABLE,
        }
        assert needed <= names


@pytest.mark.parametrize("values", ALL, ids=["defaults", *(e.stem for e in EXAMPLES)])
def test_rendered_command_lines_are_the_programs(values: dict[str, Any]) -> None:
    objects = render(values)
    for role in ("prefill", "decode"):
        made = container(objects, role, "worker")
        variables = {"POD_NAME": f"{role}-0", "POD_IP": "10.0.0.7"}
        given = parse_worker(worker_command(objects, role, variables))
        assert (given.role, given.host) == (role, "10.0.0.7")
        ports = {p["name"]: p["containerPort"] for p in made["ports"]}
        assert (given.port, given.metrics_port) == (ports["grpc"], ports["metrics"])
    router = container(objects, "router")
    command = command_line(router, {"POD_NAME": "router-0", "POD_IP": "10.0.0.8"})
    given = parse_router(command)
    ports = {p["name"]: p["containerPort"] for p in router["ports"]}
    assert (given.api, given.http_port) == ("http", ports["http"])
    assert "grpc" not in ports
    assert given.admin.host == "10.0.0.8"
    assert (given.admin.port, given.admin.grpc_port) == (ports["admin"], ports["admin-grpc"])
    replica = container(objects, "grpc")
    told = parse_router(command_line(replica, {"POD_NAME": "grpc-0", "POD_IP": "10.0.0.8"}))
    ports = {p["name"]: p["containerPort"] for p in replica["ports"]}
    assert (told.api, told.http_port, told.grpc_port) == ("grpc", ports["http"], ports["grpc"])
    # In everything else it is an ordinary replica, except that it scales no pool.
    own = {"api": "http", "router_id": given.router_id, "scale_objects": given.scale_objects}
    assert replace(told, **own) == given


def test_the_memory_limit_of_a_grpc_replica_holds_what_it_may_grow() -> None:
    objects = render()
    for component in ("grpc", "picker"):
        made = container(render(values_of(GATEWAY)), component)
        pod = {"POD_NAME": "p", "POD_IP": "10.0.0.8"}
        allowed_bytes = parse_router(command_line(made, pod)).grpc_memory
        assert made["resources"]["limits"] == {"memory": "2Gi"}
        assert 1.5 * allowed_bytes + (400 << 20) < 2 << 30
    assert find(objects, "Service", "grpc")["spec"]["ports"][0]["port"] == 8001


def test_without_grpc_there_is_nothing_of_it() -> None:
    objects = render({"grpc": {"enabled": False}, "monitoring": {"serviceMonitors": True}})
    assert not [o for o in objects if component_of(o).startswith("grpc")]
    selectors = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]
    assert "component: grpc" not in yaml.safe_dump(selectors)
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    with pytest.raises(HelmError, match=r"grpc\.enabled is false"):
        render({"grpc": {"enabled": False}, "router": {"gateway": {"grpc": route}}})


def test_a_pools_values_win_over_those_of_both() -> None:
    objects = render(
        {
            "worker": {"replicas": 3, "options": {"threads": 2, "drainDeadline": 90}},
            "prefill": {"replicas": 0, "options": {"threads": 4, "kvMemory": 1 << 35}},
            "decode": {"sizeOwner": "other"},
        }
    )
    prefill, decode = (find(objects, "StatefulSet", pool) for pool in ("prefill", "decode"))
    assert prefill["spec"]["replicas"] == 0
    assert "replicas" not in decode["spec"]  # whoever owns it is not overruled by an upgrade
    given = {pool: options(container(objects, pool)["args"]) for pool in ("prefill", "decode")}
    assert given["prefill"]["threads"] == "4"
    assert given["prefill"]["kv-memory"] == "34359738368"
    assert given["decode"]["threads"] == "2"
    assert {g["drain-deadline"] for g in given.values()} == {"90"}


ROOT_DIGEST, OTHER_DIGEST = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


@pytest.mark.parametrize(
    ("worker", "prefill", "image"),
    [
        ({}, {}, f"tandem-llm@{ROOT_DIGEST}"),
        ({"pullPolicy": "Always"}, {}, f"tandem-llm@{ROOT_DIGEST}"),
        ({"tag": "1-cuda"}, {}, "tandem-llm:1-cuda"),
        ({"repository": "other"}, {}, "other:1"),
        ({"digest": ""}, {}, "tandem-llm:1"),
        ({"repository": "other", "digest": OTHER_DIGEST}, {}, f"other@{OTHER_DIGEST}"),
        ({}, {"tag": "2"}, "tandem-llm:2"),
        ({"digest": OTHER_DIGEST}, {"tag": "2"}, "tandem-llm:2"),
        ({"digest": OTHER_DIGEST}, {"repository": "other"}, "other:1"),
        ({"tag": "2"}, {"digest": OTHER_DIGEST}, f"tandem-llm@{OTHER_DIGEST}"),
        ({"tag": "2"}, {"pullPolicy": "Always"}, "tandem-llm:2"),
    ],
)
def test_who_names_another_image_does_not_mean_the_digest_that_was_there(
    worker: dict[str, str], prefill: dict[str, str], image: str
) -> None:
    objects = render(
        {
            "image": {"tag": "1", "digest": ROOT_DIGEST},
            "worker": {"image": worker},
            "prefill": {"image": prefill},
        }
    )
    assert container(objects, "prefill")["image"] == image
    assert container(objects, "router")["image"] == f"tandem-llm@{ROOT_DIGEST}"


def test_grace_periods_hold_a_drain() -> None:
    values = {
        "worker": {"options": {"drainDeadline": 90}},
        "router": {"preStopSleep": 8, "options": {"drainDeadline": 120}},
    }
    objects = render(values)
    router = find(objects, "Deployment", "router")["spec"]["template"]["spec"]
    assert router["terminationGracePeriodSeconds"] > 8 + 120 + 10
    assert container(objects, "router")["lifecycle"]["preStop"]["exec"]["command"][1] == "8"
    for pool in ("prefill", "decode"):
        pod = find(objects, "StatefulSet", pool)["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > 90 + 10


def test_routers_scale_what_no_autoscaler_owns() -> None:
    def objects_of(values: dict[str, Any]) -> Mapping[str, str]:
        command = command_line(container(render(values), "router"), {"POD_NAME": "router-0"})
        return parse_router(command).scale_objects

    every = {
        "prefill": "statefulsets/demo-tandem-prefill",
        "decode": "statefulsets/demo-tandem-decode",
        "router": "deployments/demo-tandem-router",
    }
    hpa = {"sizeOwner": "hpa", "hpa": {"metrics": [{"type": "Resource"}]}}
    assert objects_of({}) == objects_of({"worker": {"sizeOwner": "other"}}) == every
    assert objects_of({"prefill": hpa}) == {k: v for k, v in every.items() if k != "prefill"}
    assert objects_of({"worker": hpa}) == {}  # without a token, too: tests/chart/test_pods.py
    assert objects_of({"router": {"scalesPools": False}}) == {}
    assert objects_of({"rbac": {"create": False}}) == {}
    assert objects_of({"rayCluster": {"enabled": True}}) == {}
    made = {(f"{o['kind'].lower()}s", o["metadata"]["name"]) for o in render()}
    assert {tuple(owner.split("/")) for owner in every.values()} <= made


def test_routers_that_autoscale_set_the_sizes_that_an_upgrade_leaves_alone() -> None:
    values = {"worker": {"sizeOwner": "other"}, "router": {"options": {"autoscale": "on"}}}
    objects = render(values)
    given = parse_router(command_line(container(objects, "router"), {"POD_NAME": "router-0"}))
    assert given.autoscale.mode == "on"
    assert set(given.scale_objects) == {"prefill", "decode", "router"}
    pools = [o for o in objects if o["kind"] == "StatefulSet" and "redis" not in str(o["metadata"])]
    assert pools
    assert not any("replicas" in o["spec"] for o in pools)


def test_a_worker_may_start_for_as_long_as_its_pool_says() -> None:
    """Its own deadline ends it, with the reason in its log, before kubelet's probe does."""
    objects = render({"decode": {"startDeadline": 7200}})
    for pool, seconds in (("prefill", 1800), ("decode", 7200)):
        made = container(objects, pool)
        command = command_line(made, {"POD_NAME": f"{pool}-0", "POD_IP": "10.0.0.7"})
        assert parse_worker(command).start_deadline_s == seconds
        probe = made["startupProbe"]
        assert seconds < probe["periodSeconds"] * probe["failureThreshold"] <= seconds + 60


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 2}, "replica"),
        ({"decode": {"option": {}}}, "option"),
        ({"decode": {"options": {"maxSeqs": 4}}}, "maxSeqs"),
        ({"decode": {"options": {"device": "gpu"}}}, "device"),
        ({"decode": {"replicas": -1}}, "replicas"),
        ({"decode": {"replicas": "2"}}, "replicas"),
        ({"worker": {"options": {"kvMemory": -1}}}, "kvMemory"),
        ({"worker": {"options": {"kvMemory": "4XB"}}}, "kvMemory"),
        ({"worker": {"resources": {"limits": {"memory": "4 GB"}}}}, "memory"),
        ({"worker": {"sizeOwner": "vpa"}}, "sizeOwner"),
        ({"decode": {"sizeOwner": "keda"}}, "keda.prometheus is empty"),
        ({"router": {"options": {"autoscale": "on"}}}, "set decode.sizeOwner to other"),
        (
            {
                "worker": {"sizeOwner": "other"},
                "router": {"scalesPools": False, "options": {"autoscale": "on"}},
            },
            "routers may set no pool's size",
        ),
        (
            {"decode": {"sizeOwner": "keda", "keda": {"prometheus": "http://prometheus:9090"}}},
            "router.options.autoscale",
        ),
        ({"router": {"options": {"autoscale": "on"}}}, "autoscale"),
        (
            {"router": {"options": {"autoscale": "dry-run", "autoscaleDecodeMin": 0}}},
            "set holdDeadline to more",
        ),
        ({"decode": {"sizeOwner": "hpa"}}, "hpa.metrics is empty"),
        ({"model": {"source": "s3"}}, "source"),
        ({"model": {"source": "pvc"}}, "claimName"),
        ({"model": {"source": "hub", "hub": {"name": "just-a-name"}}}, "hub/name"),
        ({"model": {"source": "image"}}, "reference"),
        ({"router": {"replicas": 0}}, "replicas"),
        (
            {"router": {"files": {"claimName": "a"}, "options": {"filesUrl": "s3://bucket"}}},
            "leave out one of them",
        ),
        ({"router": {"gateway": {"http": {"enabled": True}}}}, "parentRefs"),
        ({"redis": {"builtin": {"enabled": False}}}, "urlSecret"),
        ({"image": {"digest": "sha256:12"}}, "digest"),
        ({"rayCluster": {"rayVersion": "latest"}}, "rayVersion"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(values)
    assert named in str(refused.value)


def test_routers_share_a_claim_for_files() -> None:
    values = {"router": {"files": {"claimName": "shared"}}}
    objects = render(values)
    made = container(objects, "router")
    url = parse_router(command_line(made, {"POD_NAME": "router-0"})).files.files_url
    (mount,) = [m for m in made["volumeMounts"] if url.startswith(m["mountPath"])]
    pod = dict(pod_templates(objects))["router"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}


def test_a_size_may_have_a_unit() -> None:
    objects = render({"prefill": {"options": {"kvMemory": "4GiB"}}})
    given = [options(container(objects, pool)["args"]) for pool in ("prefill", "decode")]
    assert [parse_size(each["kv-memory"]) for each in given] == [4 << 30, 0]


def test_pools_that_cannot_go_together_are_refused() -> None:
    with pytest.raises(HelmError, match="blockSize of prefill is 32, of decode 16"):
        render({"prefill": {"options": {"blockSize": 32}}})
    hpa = {"sizeOwner": "hpa", "hpa": {"metrics": [{"type": "Resource"}]}}
    with pytest.raises(HelmError, match="cannot scale a group of a RayCluster"):
        render({"decode": hpa, "rayCluster": {"enabled": True}})
    with pytest.raises(HelmError, match=r"RayCluster has no scale of its own: .* decode\.replicas"):
        render({"decode": {"sizeOwner": "other"}, "rayCluster": {"enabled": True}})
