"""The RayCluster whose pods come and go: what KubeRay, Ray's autoscaler and bash make of it.

No KubeRay operator runs here. Ray's own code reads the object as its autoscaler does in the head's
pod, and the containers' commands run in a real bash with KubeRay's variable.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from tandem.cluster.launch.controller import ControllerOptions
from tandem.cluster.pools import Member, PoolCommand
from tandem.cluster.processes import leave_node, process
from tandem.cluster.processes.keeper import expand
from tandem.common.config.cluster import RUN_FOLDER_VARIABLE, Role
from tandem.common.options import parse
from tandem.net.store.roles import rules
from tests.harness.chart import (
    EXAMPLES,
    Object,
    container,
    find,
    notes,
    pod_templates,
    render,
    values_of,
)
from tests.harness.cluster import wait_for
from tests.harness.programs import parse_worker

EXAMPLE = next(values_of(e) for e in EXAMPLES if e.stem == "kuberay-autoscaled")
POOLS: tuple[Role, ...] = ("prefill", "decode")
START_HEAD = "ray start --head --resources='{\"a\": 1}'  --block"  # as KubeRay writes it
STARTED_HEAD = [
    *("python", "-m", "tandem.cluster.ray.start_command"),  # without Ray's client server
    *("start", "--head", '--resources={"a": 1}', "--block"),
]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render({**EXAMPLE, "decode": {"replicas": 3, "options": {"drainDeadline": 90}}})


def ray_cluster(objects: list[Object]) -> Object:
    (found,) = (o for o in objects if o["kind"] == "RayCluster")
    return found


def run_bash(made: Object, folder: Path, start_ray: str, *, programs: int) -> list[list[str]]:
    """Runs a container's command, and returns the command lines of the programs in it."""
    told = folder / "told"
    told.mkdir()
    for program in ("tandem", "ray", "python"):  # each has a file, which appears whole
        script = folder / program
        own = folder / f"{program}.told"
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\0" {program} "$@" >{own}\nmv {own} {told}/{program}\n'
        )
        script.chmod(0o755)
    (folder / "sleep").write_text("#!/bin/sh\nkill -9 $PPID\n")  # ends the loop after one turn
    (folder / "sleep").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": start_ray}
    command = [*made["command"], *made["args"]]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        assert process.wait(20) == 0
        wait_for(lambda: len(list(told.iterdir())) == programs, deadline_s=20, what="all programs")
    return [path.read_text().rstrip("\0").split("\0") for path in told.iterdir()]


def test_ray_knows_the_seats_of_both_groups(objects: list[Object]) -> None:
    read: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(ray_cluster(objects))
    assert read["idle_timeout_minutes"] == 2
    for pool in POOLS:
        node = read["available_node_types"][pool]
        assert node["resources"][pool] == 1
        assert (node["min_workers"], node["max_workers"]) == (0, 64)


def test_the_autoscaler_owns_the_number_of_pods(objects: list[Object]) -> None:
    spec = ray_cluster(objects)["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert not any("replicas" in group for group in spec["workerGroupSpecs"])
    budgets = [o["metadata"]["name"] for o in objects if o["kind"] == "PodDisruptionBudget"]
    assert budgets == ["demo-tandem-router", "demo-tandem-grpc"]


def test_the_job_of_an_upgrade_frees_the_groups_that_the_autoscaler_has_patched(
    objects: list[Object],
) -> None:
    made = container(objects, "keep-sizes", "keep-sizes")
    assert made["args"] == ["deployments/demo-tandem-router=2", "rayclusters/demo-tandem-ray"]
    (role,) = (o for o in objects if o["kind"] == "Role" and "keep-sizes" in o["metadata"]["name"])
    rule = next(rule for rule in role["rules"] if rule["apiGroups"] == ["ray.io"])
    assert rule["resourceNames"] == ["demo-tandem-ray"]
    assert (rule["resources"], rule["verbs"]) == (["rayclusters"], ["get", "patch"])
    assert "rayclusters" not in str(render({"rayCluster": {"enabled": True}}))


def test_the_autoscaler_alone_has_a_token(objects: list[Object]) -> None:
    """KubeRay puts its container into the head's pod, with these mounts and an account."""
    spec = ray_cluster(objects)["spec"]
    pod = spec["headGroupSpec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (volume,) = (v for v in pod["volumes"] if "serviceAccountToken" in str(v))
    mounts = {m["name"]: m["mountPath"] for m in spec["autoscalerOptions"]["volumeMounts"]}
    assert mounts[volume["name"]] == "/var/run/secrets/kubernetes.io/serviceaccount"
    (head,) = pod["containers"]
    assert volume["name"] not in {m["name"] for m in head["volumeMounts"]}


def test_the_head_starts_ray_and_the_controller(objects: list[Object], tmp_path: Path) -> None:
    made = container(objects, "ray-head")
    ran = run_bash(made, tmp_path, START_HEAD, programs=2)
    assert STARTED_HEAD in ran
    (words,) = (words for words in ran if words[0] == "tandem")
    assert words[1] == "controller"
    options = parse(ControllerOptions, "tandem controller", words[2:])
    assert (options.num_prefill, options.num_decode) == (1, 3)
    assert options.request_nodes
    assert options.drain_deadline_s == 105  # longer than a decode worker drains itself
    assert shlex.join(words).count("pools.json") == 1


def test_a_worker_pod_starts_ray_alone(objects: list[Object], tmp_path: Path) -> None:
    made = container(objects, "decode")
    start = "ray start --address=a:6379 --resources='{\"decode\": 1}' --block"
    assert run_bash(made, tmp_path, start, programs=1) == [shlex.split(start)]


def test_a_pod_that_ends_drains_its_worker_first(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook runs with the container's variables, and a container that is started again has no
    mark of it."""
    made = container(objects, "decode")
    hook = made["lifecycle"]["preStop"]["exec"]["command"]
    (pod,) = (pod for name, pod in pod_templates(objects) if name == "decode")
    assert 90 < int(hook[-1]) < pod["spec"]["terminationGracePeriodSeconds"]
    variables = {e["name"]: e.get("value", "") for e in made["env"]}
    assert variables[RUN_FOLDER_VARIABLE] == "/tmp/tandem"
    folder = tmp_path / "run"
    worker = process.start("decode-0", ["sleep", "600"], folder, os.environ)
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    subprocess.run([sys.executable, *hook[1:]], check=True, timeout=60)
    assert worker.wait(0)
    worker.close()
    assert leave_node.leaves(folder)
    assert made["args"][0].startswith(f"rm -f /tmp/tandem/{leave_node.MARK}; ")


@pytest.mark.parametrize("component", ["ray-head", *POOLS])
def test_ray_does_not_wait_for_the_agent_of_a_worker_that_has_drained(
    objects: list[Object], component: str
) -> None:
    """Ray would wait 30 s for its actors: the agents, and in the head's pod the controller."""
    text = "import ray._private.ray_constants as r; print(r.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S)"
    assert float(run_python(text, variables_of(objects, component))) == 0


@pytest.mark.parametrize("component", ["ray-head", *POOLS])
def test_ray_reports_its_use_to_nobody(objects: list[Object], component: str) -> None:
    text = "from ray._common.usage.usage_lib import usage_stats_enabled as u; print(u())"
    assert run_python(text, variables_of(objects, component)) == "False"


def variables_of(objects: list[Object], component: str) -> dict[str, str]:
    made = container(objects, component)
    return {e["name"]: e["value"] for e in made["env"] if "value" in e}


def run_python(text: str, variables: dict[str, str]) -> str:
    """Runs Ray's own code with the variables of Ray that a container has."""
    ray = {k: v for k, v in variables.items() if k.startswith("RAY_") and "TLS" not in k}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **ray},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_without_the_autoscaler_the_worker_itself_gets_the_signal() -> None:
    made = container(render({"rayCluster": {"enabled": True}}), "decode", "worker")
    assert made["command"][-2:] == ["tandem", "worker"]
    assert "lifecycle" not in made


def test_without_the_autoscaler_the_containers_start_ray_alone(tmp_path: Path) -> None:
    objects = render({"rayCluster": {"enabled": True}})
    (tmp_path / "head").mkdir()
    head = container(objects, "ray-head")
    assert run_bash(head, tmp_path / "head", START_HEAD, programs=1) == [STARTED_HEAD]
    start = "ray start --address=a:6379 --block"
    made = container(objects, "decode", "ray")
    assert run_bash(made, tmp_path, start, programs=1) == [shlex.split(start)]


@pytest.mark.parametrize("pool", POOLS)
def test_the_controller_has_the_workers_commands(objects: list[Object], pool: Role) -> None:
    (made,) = (o for o in objects if o["metadata"]["name"] == "demo-tandem-pools")
    pools = msgspec.json.decode(made["data"]["pools.json"], type=dict[Role, PoolCommand])
    words = pools[pool].filled(Member(f"{pool}-7", pool, ordinal=0))
    given = parse_worker([expand(word, {"POD_IP": "10.0.0.7"}) for word in words])
    assert (given.role, given.worker_id, given.host) == (pool, f"{pool}-7", "10.0.0.7")
    assert given.drain_deadline_s == (90 if pool == "decode" else 30)
    assert json.loads(made["data"]["pools.json"]).keys() == set(POOLS)


def test_the_controller_has_a_user_of_redis(objects: list[Object]) -> None:
    script = container(objects, "redis", "redis")["command"][2]
    assert f">$CONTROLLER_PASSWORD {rules('controller', 'serving.demo-tandem')}\n" in script
    names = {e["name"]: e for e in container(objects, "ray-head")["env"]}
    secret = names["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"]
    assert find(objects, "Secret", "redis-controller")["metadata"]["name"] == secret
    assert "//controller:" in names["TANDEM_REDIS_URL"]["value"]
    for pool in POOLS:  # whoever runs code there by Ray's token reaches neither sizes nor keys
        env = {e["name"]: e for e in container(objects, pool)["env"]}
        assert "//worker:" in env["TANDEM_REDIS_URL"]["value"]


def test_without_the_autoscaler_there_is_none_of_it() -> None:
    for values in ({}, {"rayCluster": {"enabled": True}}):
        text = str(render(values))
        assert "tandem controller" not in text
        assert "redis-controller" not in text


def test_the_notes_scale_by_a_router() -> None:
    assert "tandem scale decode=2" in notes(EXAMPLE)
