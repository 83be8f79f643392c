"""Upgrades by real Helm of pools of one worker, with `upgradeHook.surge`, into a stand-in for the
API server whose StatefulSets have pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from helm_python import HelmError

from tandem.errors import DeadlineExceeded
from tandem.router.scaling.kubernetes import surge
from tandem.router.scaling.kubernetes.keep_sizes import LATE, MANAGER, SURGE
from tests.harness.chart import CHART, NAMESPACE, RELEASE, render
from tests.harness.helm_release import OBJECTS, Release, installed
from tests.harness.stateful_sets import StatefulSetServer

POOLS = [OBJECTS["prefill"], OBJECTS["decode"]]
DECODE = OBJECTS["decode"]
NEW: dict[str, Any] = {"logLevel": "DEBUG", "upgradeHook": {"surge": True}}


@pytest.fixture
def server() -> StatefulSetServer:
    return StatefulSetServer()


@pytest.fixture
def release(server: StatefulSetServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    monkeypatch.setattr(surge, "_POLL_S", 0.01)
    with installed(CHART, server, num_decode=1) as made:
        for path in POOLS:
            server.settle(path)
        yield made


@pytest.mark.parametrize("added", [True, False])
def test_a_pool_of_one_always_has_a_ready_worker_if_one_is_added(
    release: Release, server: StatefulSetServer, added: bool
) -> None:
    release.upgrade(NEW | {"upgradeHook": {"surge": added}})
    for path in POOLS:
        assert server.settle(path) == (1 if added else 0)
        assert "DEBUG" in server.pods[path][0].revision
    assert server.jobs == ["Complete"] * (3 if added else 1)
    assert [release.size(name) for name in OBJECTS] == [1, 1, 2]
    assert not [path for path in server.objects if "surge" in path or "keep-sizes" in path]
    if added:
        assert server.owners[DECODE] == {MANAGER}
        release.upgrade(NEW | {"logLevel": "INFO"})  # whose sizes somebody owns already
        assert all(server.settle(path) == 1 for path in POOLS)
        assert [release.size(name) for name in OBJECTS] == [1, 1, 2]


def test_pools_of_other_sizes_get_no_worker(release: Release, server: StatefulSetServer) -> None:
    release.scale("prefill", 0)
    release.upgrade(NEW | {"decode": {"replicas": 2}})
    assert [release.size(name) for name in OBJECTS] == [0, 2, 2]
    assert SURGE not in server.owners[DECODE]


def test_without_room_helm_stops_and_the_worker_is_taken_back(
    release: Release, server: StatefulSetServer
) -> None:
    server.room = 1
    with pytest.raises(HelmError, match="pre-upgrade"):
        release.upgrade(NEW | {"upgradeHook": {"surge": True, "surgeDeadline": 1}})
    assert "not ready within 1 s" in server.jobs[-1]
    assert server.owners[DECODE] == {MANAGER}
    assert [release.size(name) for name in OBJECTS] == [1, 1, 2]
    assert "DEBUG" not in str(server.objects[DECODE]["spec"]["template"])


def test_an_upgrade_mends_a_pool_whose_only_worker_is_not_ready(
    release: Release, server: StatefulSetServer
) -> None:
    server.pods[DECODE][0].num_looks = 10**9
    release.upgrade(NEW | {"upgradeHook": {"surge": True, "surgeDeadline": 30}})
    server.settle(DECODE)
    assert "DEBUG" in server.pods[DECODE][0].revision
    assert SURGE not in server.owners[DECODE]
    assert [release.size(name) for name in OBJECTS] == [1, 1, 2]


def test_a_rollout_that_is_stuck_is_not_waited_for() -> None:
    """A worker that is added gets its revision, too, which may never be ready."""
    live = {"metadata": {}, "spec": {"replicas": 2}, "status": {"readyReplicas": 1}}
    assert not surge._is_added(live)
    live["status"] |= {"currentRevision": "a", "updateRevision": "b"}
    assert surge._is_added(live)


def test_a_size_that_somebody_sets_during_an_upgrade_stays(
    release: Release, server: StatefulSetServer
) -> None:
    def scale(path: str) -> None:
        if path == DECODE and SURGE in server.owners[path]:
            server.scale(path, 4)

    server.while_read = scale
    release.upgrade(NEW)
    assert [release.size(name) for name in OBJECTS] == [1, 4, 2]


def test_what_a_failed_upgrade_left_is_taken_back_by_the_next_one(
    release: Release, server: StatefulSetServer
) -> None:
    spec = server.objects[DECODE]["spec"]
    name = spec["serviceName"]
    spec["serviceName"] = "another"
    with pytest.raises(HelmError, match="Invalid"):
        release.upgrade(NEW)
    assert release.size("decode") == 2

    server.objects[DECODE]["spec"] |= {"serviceName": name, "template": {}}
    server.room = 0  # pods of the new template do not start
    with pytest.raises(DeadlineExceeded, match="the extra worker that the upgrade had added stays"):
        end(server)
    assert release.size("decode") == 2
    assert server.fewest[DECODE] == 1

    release.upgrade(NEW | {"upgradeHook": {"surge": False}})
    assert [release.size(name) for name in OBJECTS] == [1, 1, 2]


def test_a_rollback_takes_back_what_a_failed_upgrade_left(
    release: Release, server: StatefulSetServer
) -> None:
    release.upgrade(NEW)
    spec = server.objects[DECODE]["spec"]
    name = spec["serviceName"]
    spec["serviceName"] = "another"
    with pytest.raises(HelmError, match="Invalid"):
        release.upgrade(NEW)
    spec["serviceName"] = name
    assert release.size("decode") == 2
    release.helm.rollback(RELEASE, version=2, timeout=60)
    assert [release.size(name) for name in OBJECTS] == [1, 1, 2]


def end(server: StatefulSetServer) -> None:
    with server.client(NAMESPACE) as client:
        surge.run(client, ["end", "0.1", f"statefulsets/{RELEASE}-tandem-decode"])


def test_a_status_of_an_older_spec_does_not_count() -> None:
    owned = {"manager": SURGE, "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    live: dict[str, Any] = {
        "metadata": {"generation": 3, "managedFields": [owned]},
        "spec": {"replicas": 2},
        "status": {
            "observedGeneration": 2,
            "readyReplicas": 2,
            "currentRevision": "a",
            "updateRevision": "a",
        },
    }
    assert not surge._is_ready(live)
    assert not surge._is_replaced(live)
    live["status"]["observedGeneration"] = 3
    assert surge._is_replaced(live)
    live["status"]["updateRevision"] = "b"
    assert surge._is_ready(live)
    assert not surge._is_replaced(live)


@pytest.mark.parametrize("version", ["1.31", "1.36"])
def test_the_jobs_are_valid_and_give_up_where_another_try_would_be_late(version: str) -> None:
    jobs = [o for o in render(NEW) if o["kind"] == "Job"]
    for made in jobs:
        kubernetes_validate.validate(made, version, strict=True)
    names = [made["metadata"]["name"].removeprefix(f"{RELEASE}-tandem-") for made in jobs]
    assert names == ["keep-sizes", "surge", "end-surge"]
    for name, made in zip(names[1:], jobs[1:], strict=True):
        (rule,) = made["spec"]["podFailurePolicy"]["rules"]
        assert rule["onExitCodes"]["values"] == [LATE]
        assert rule["onExitCodes"]["containerName"] == name


@pytest.mark.parametrize(
    "values",
    [
        {"upgradeHook": {"surge": True, "enabled": False}},
        {"rbac": {"create": False}},
        {"rayCluster": {"enabled": True}},
        {"router": {"options": {"autoscale": "on"}}, "worker": {"sizeOwner": "other"}},
    ],
)
def test_surge_is_refused_where_no_pool_can_have_it(values: dict[str, Any]) -> None:
    with pytest.raises(HelmError, match=r"upgradeHook\.surge is true"):
        render({"upgradeHook": {"surge": True}} | values)
