"""`tandem scale` where Kubernetes owns the sizes, against a stand-in for its API server.

What routers are told, and what they may, is what the chart renders.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.common.config.autoscale import AutoscaleConfig
from tandem.errors import DeadlineExceeded, NotNow, ScaleAway, ScaleRefused, TandemError
from tandem.net.rpc.tandem.v1 import cluster_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.router.autoscaler.demand import DemandMeter
from tandem.router.scaling import size_owner
from tandem.router.scaling.autoscale import AutoscaleLoop
from tandem.router.scaling.kubernetes import scale as kubernetes_scale
from tandem.router.scaling.kubernetes.scale import KubernetesScale
from tests.harness.api_server import ApiServer
from tests.harness.chart import NAMESPACE, command_line, container, find, render
from tests.harness.programs import parse_router
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

PREFILL = "statefulsets/demo-tandem-prefill"
DECODE = "statefulsets/demo-tandem-decode"
ROUTERS = "deployments/demo-tandem-router"
CHART = render()
OBJECTS = parse_router(
    command_line(container(CHART, "router"), {"POD_NAME": "router-0"})
).scale_objects
FOLDER = Path(tempfile.mkdtemp(prefix="tandem-api-"))  # before the router of this module is made
ROUTER = {"scale_objects": OBJECTS, "service_account": str(FOLDER / "account")}


def role(objects: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (verb, resource, name)
        for rule in find(objects, "Role", "scaler")["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
    }


def make_server(folder: Path) -> ApiServer:
    names = {
        f"{o['kind'].lower()}s/{o['metadata']['name']}": o["spec"].get("replicas", 1)
        for o in CHART
        if o["kind"] in ("StatefulSet", "Deployment")
    }
    return ApiServer(folder, NAMESPACE, names, role(CHART))


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Callable[[ApiServer], KubernetesScale]:
    """Gives this process the variables of a router in a pod of that server's cluster."""

    def enter(server: ApiServer) -> KubernetesScale:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return KubernetesScale(OBJECTS, server.account)

    return enter


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with make_server(tmp_path) as started:
        yield started


@pytest.fixture
def scale(server: ApiServer, pod: Callable[[ApiServer], KubernetesScale]) -> KubernetesScale:
    return pod(server)


def patches(server: ApiServer) -> list[str]:
    return [path for path in server.requests if "fieldManager" in path]


async def failure(scale: KubernetesScale, **sizes: int) -> TandemError:
    async with asyncio.timeout(20):
        with pytest.raises(TandemError) as failed:
            await scale.set_sizes(sizes)
    return failed.value


async def test_every_pool_is_set_and_no_other(server: ApiServer, scale: KubernetesScale) -> None:
    before = dict(server.replicas)
    await scale.set_sizes({"decode": 3})
    assert server.replicas == {**before, DECODE: 3}
    assert server.requests == [
        "/apis/apps/v1/namespaces/serving/statefulsets/demo-tandem-decode/scale"
        "?fieldManager=tandem-router"
    ]
    await scale.set_sizes({"prefill": 0, "decode": 1, "router": 5})
    assert server.replicas == {**before, PREFILL: 0, DECODE: 1, ROUTERS: 5}


async def test_the_pods_that_are_wanted_and_that_run_are_told(
    server: ApiServer, scale: KubernetesScale
) -> None:
    server.replicas[DECODE] = 3
    told = await scale.pools()
    assert told["decode"] == {"wanted": 3, "running": 1}
    assert set(told) == {"prefill", "decode", "router"}


async def test_a_token_that_kubelet_renewed_is_taken(
    server: ApiServer, scale: KubernetesScale
) -> None:
    await scale.set_sizes({"decode": 2})
    server.write_token("another-token")
    await scale.set_sizes({"decode": 3})
    assert server.replicas[DECODE] == 3


async def test_a_proxy_gets_no_token(
    server: ApiServer, scale: KubernetesScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await scale.set_sizes({"decode": 2})
    assert server.replicas[DECODE] == 2


async def test_a_refusal_says_why_and_under_what_code(
    server: ApiServer, scale: KubernetesScale
) -> None:
    before = dict(server.replicas)
    for status, kind in (
        (403, ScaleRefused),
        (401, ScaleRefused),
        (404, NotNow),
        (409, NotNow),
        (422, NotNow),
        (429, ScaleAway),
        (500, ScaleAway),
        (503, ScaleAway),
    ):
        server.answer = status
        error = await failure(scale, decode=3)
        assert type(error) is kind, status
        assert f"decode was not set: the Kubernetes API server answered {status}" in error.message
        assert f"as the test wants it: {status}" in error.message
        assert server.token not in error.message
    assert server.replicas == before


async def test_what_the_role_does_not_name_is_refused(
    server: ApiServer, scale: KubernetesScale
) -> None:
    """The other pools are set, and one message has the result of each."""
    server.allowed = {entry for entry in server.allowed if "prefill" not in entry[2]}
    error = await failure(scale, prefill=2, decode=4)
    assert type(error) is ScaleRefused
    assert "prefill was not set" in error.message
    assert "is forbidden" in error.message
    assert "the size of decode was set to 4" in error.message
    assert (server.replicas[PREFILL], server.replicas[DECODE]) == (1, 4)


async def test_an_object_that_is_gone_is_named(server: ApiServer, scale: KubernetesScale) -> None:
    del server.replicas[DECODE]
    error = await failure(scale, decode=2)
    assert type(error) is NotNow
    assert f'404 for {DECODE}: statefulsets.apps "demo-tandem-decode" not found' in error.message


async def test_a_token_that_is_refused(server: ApiServer, scale: KubernetesScale) -> None:
    server.token = "revoked"
    assert type(await failure(scale, decode=2)) is ScaleRefused


async def test_an_api_server_that_is_away(server: ApiServer, scale: KubernetesScale) -> None:
    server.close()
    error = await failure(scale, decode=2)
    assert type(error) is ScaleAway
    assert "cannot be reached" in error.message


async def test_one_that_does_not_answer_is_given_up(
    server: ApiServer, scale: KubernetesScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_scale, "DEADLINE_S", 0.3)
    server.answer = 0
    error = await failure(scale, decode=2)
    assert type(error) is DeadlineExceeded
    assert "the size of decode may be the old or the new one" in error.message


async def test_another_authority_gets_no_token(
    server: ApiServer, scale: KubernetesScale, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = make_server(other)
    (server.account / "ca.crt").write_bytes((stranger.account / "ca.crt").read_bytes())
    error = await failure(scale, decode=2)
    assert type(error) is ScaleAway
    assert "certificate" in error.message.lower()
    assert not server.requests


async def test_a_pool_of_another_owner_is_refused_before_anything_is_set(
    server: ApiServer, pod: Callable[[ApiServer], KubernetesScale]
) -> None:
    pod(server)
    scale = KubernetesScale({"decode": DECODE}, server.account)
    error = await failure(scale, decode=2, prefill=2)
    assert type(error) is NotNow
    assert "cannot set the size of prefill" in error.message
    assert not server.requests


async def test_outside_a_pod_and_without_a_token(
    server: ApiServer, scale: KubernetesScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.account / "token").unlink()
    assert "no usable service account" in (await failure(scale, decode=2)).message
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    error = await failure(scale, decode=2)
    assert type(error) is NotNow
    assert "not in a pod" in error.message


@pytest.fixture(scope="module", autouse=True)
def reads_often() -> Iterator[None]:
    """The router of this module reads the sizes more often than every 10 s."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(size_owner, "_KUBERNETES_WATCH_S", 0.5)
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[ApiServer]:
    """Starts the API server whose account the router of this module has."""
    FOLDER.mkdir(exist_ok=True)
    with make_server(FOLDER) as started:
        yield started
    shutil.rmtree(FOLDER)


async def test_over_http_and_grpc(
    router: RunningRouter, cluster: ApiServer, pod: Callable[[ApiServer], KubernetesScale]
) -> None:
    pod(cluster)
    answer = await router.admin.post("/v1/cluster", json={"decode": 3})
    assert (answer.status_code, answer.json()) == (202, {"wanted": {"decode": 3}})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.admin.grpc_port}") as channel:
        stub = ClusterStub(channel)
        reply = await stub.ScalePools(pb.ScalePoolsRequest(sizes={"prefill": 2}))
        assert dict(reply.wanted) == {"prefill": 2}
        assert (cluster.replicas[PREFILL], cluster.replicas[DECODE]) == (2, 3)
        answer = await router.admin.post("/v1/cluster", json={"decode": -1})
        assert answer.status_code == 400
        for status, http, code in (
            (403, 403, grpc.StatusCode.PERMISSION_DENIED),
            (404, 409, grpc.StatusCode.FAILED_PRECONDITION),
            (500, 503, grpc.StatusCode.UNAVAILABLE),
        ):
            cluster.answer = status
            answer = await router.admin.post("/v1/cluster", json={"decode": 1})
            assert answer.status_code == http
            assert f"answered {status}" in answer.json()["error"]["message"]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ScalePools(pb.ScalePoolsRequest(sizes={"decode": 1}))
            assert refused.value.code() == code
            assert f"answered {status}" in str(refused.value.details())
        cluster.answer = None
    assert cluster.replicas[DECODE] == 3
    assert not await router.router.view.redis.exists(
        f"{{tandem:{router.router.view.cluster.cluster_id}}}:scale"
    )


async def test_a_pod_that_never_starts_is_told_though_nobody_looks(
    router: RunningRouter,
    cluster: ApiServer,
    pod: Callable[[ApiServer], KubernetesScale],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in tells of one pod of each pool, and both scripted workers decode."""
    pod(cluster)
    monkeypatch.setattr(router.router.view.pool_watch, "grace_s", 0.0)
    cluster.replicas |= {PREFILL: 0, DECODE: 3}
    problems = router.router.view.cluster_problems
    told = "he decode pool has 2 of 3 workers ready"
    told += "; `kubectl get pods` shows what the others wait for"
    # A reading that was under way may have had the old size of one pool.
    await eventually(lambda: problems() == {"decode pool": f"t{told}"})
    state = (await router.admin.get("/v1/cluster")).json()
    effect = "Requests are served, and decode workers prefill the prompts."
    assert state["headline"] == f"T{told}. {effect}"
    metrics = (await router.admin.get("/metrics")).text
    assert 'tandem_pool_size{pool="decode"} 3.0' in metrics
    assert 'tandem_pool_workers_ready{pool="decode"} 2.0' in metrics
    cluster.replicas[DECODE] = 2
    await eventually(lambda: problems() == {})


async def test_the_command_sets_a_size_and_waits_for_it(
    router: RunningRouter, cluster: ApiServer, pod: Callable[[ApiServer], KubernetesScale]
) -> None:
    """The two scripted workers are there, so that two are reached."""
    pod(cluster)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "tandem.ops.cli",
            "scale",
            "decode=2",
            "--url",
            str(router.admin.base_url),
            "--deadline",
            "20",
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert said.decode().strip() == "decode=2"
    assert cluster.replicas[DECODE] == 2


async def test_the_autoscaler_sets_sizes_and_sees_what_others_set(
    router: RunningRouter, cluster: ApiServer, pod: Callable[[ApiServer], KubernetesScale]
) -> None:
    pod(cluster)
    view = router.router.view
    autoscale = AutoscaleConfig(mode="on", prefill_min=2, prefill_max=2, interval_s=10.0)
    config = replace(router.router._config, autoscale=autoscale)
    loop = AutoscaleLoop(config, view, DemandMeter(), router.router._trail, num_held=lambda: 0)
    cluster.replicas |= {PREFILL: 0, DECODE: 2}
    await loop._turn()
    assert (cluster.replicas[PREFILL], cluster.replicas[DECODE]) == (2, 2)
    num_asked = len(patches(cluster))
    await loop._turn()
    assert len(patches(cluster)) == num_asked, "nothing was to be set"
    assert [(d.size, d.to) for d in view.decisions] == [(2, 2), (2, 2)]

    cluster.replicas[PREFILL] = 1  # by kubectl
    await loop._turn()
    assert cluster.replicas[PREFILL] == 2
    cluster.answer = 503
    await loop._turn()
    assert [(d.size, d.to) for d in view.decisions] == [(2, 2), (2, 2)]
    cluster.answer = None


async def test_a_request_wakes_empty_pools_at_once_whichever_router_it_waits_in(
    router: RunningRouter, cluster: ApiServer, pod: Callable[[ApiServer], KubernetesScale]
) -> None:
    """The next decision would come in ten minutes."""
    pod(cluster)
    held = 0
    loops = []
    for name in ("decides", "has the request"):
        autoscale = AutoscaleConfig(mode="on", prefill_min=0, decode_min=0, interval_s=600.0)
        config = replace(router.router._config, autoscale=autoscale, router_id=name)
        view = router.router.view
        trail = router.router._trail
        counts = (lambda: 0) if name == "decides" else (lambda: held)
        loops.append(AutoscaleLoop(config, view, DemandMeter(), trail, num_held=counts))
    await view.redis.delete(loops[0]._leader_key)
    cluster.replicas |= {PREFILL: 0, DECODE: 0}
    running = []
    for loop in loops:
        await loop._turn()
        running.append(asyncio.create_task(loop.run()))
    assert [loop._policy is not None for loop in loops] == [True, False]
    assert (cluster.replicas[PREFILL], cluster.replicas[DECODE]) == (0, 0)
    held = 1
    try:
        async with asyncio.timeout(20):
            while not cluster.replicas[DECODE]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        for task in running:
            task.cancel()
