"""The size of an object after an upgrade, and the worker groups of a RayCluster before one.

tests/chart/test_upgrades.py and docs/kubernetes.md have real upgrades. For RayClusters, an HTTP
transport in the process takes the place of the API server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import Client, KubeConfig
from lightkube.config.models import Cluster, User

from tandem.errors import DeadlineExceeded, ScaleAway
from tandem.router.scaling.kubernetes import keep_sizes
from tandem.router.scaling.kubernetes.keep_sizes import (
    LATE,
    REPLICAS_ANNOTATION,
    SURGE,
    kept_size,
    main,
    read_objects,
    run,
    run_job,
    without_patches,
)
from tests.harness.api_server import ApiServer

TEMPLATE = Path(__file__).parents[3] / "helm/tandem/templates/_names.tpl"


def live(
    size: int, *, told: str = "", scaled: bool = False, surged: bool = False
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"annotations": {REPLICAS_ANNOTATION: told}} if told else {}
    if scaled:
        owned = {"f:spec": {"f:replicas": {}}}
        metadata["managedFields"] = [
            {"manager": "helm", "operation": "Apply", "fieldsV1": owned},
            {"manager": "kubectl", "subresource": "scale", "fieldsV1": owned},
        ]
    if surged:
        metadata["managedFields"][1]["manager"] = SURGE
    return {"metadata": metadata, "spec": {"replicas": size}}


@pytest.mark.parametrize(
    ("there", "replicas", "size"),
    [
        (live(5, told="2"), 2, 5),
        (live(5, told="2", scaled=True), 3, 3),
        (live(0, told="2", scaled=True), 2, 0),
        (live(2, told="2"), 3, 3),
        (live(4, scaled=True), 2, 4),  # by a chart that noted no value
        (live(4), 2, 2),
        (live(4, told="2"), None, 4),
        (live(0, scaled=True), None, 0),
        (live(2, told="1", scaled=True, surged=True), 1, 1),  # an upgrade that failed added one
        (live(2, scaled=True, surged=True), None, 1),
    ],
)
def test_the_size_after_an_upgrade(there: dict[str, Any], replicas: int | None, size: int) -> None:
    assert kept_size(there, replicas) == size


def test_objects_are_words() -> None:
    words = ["statefulsets/a=0", "statefulsets/b", "deployments/c=3"]
    assert read_objects(words) == {"statefulsets/a": 0, "statefulsets/b": None, "deployments/c": 3}


def test_the_annotation_is_the_charts() -> None:
    assert f"}}}}{REPLICAS_ANNOTATION}{{{{" in TEMPLATE.read_text()


def test_outside_a_pod_it_ends_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("tandem.net.observability.logs.configure_logging", lambda _: None)
    monkeypatch.setattr(keep_sizes.sys, "argv", ["keep_sizes", "statefulsets/a=1"])
    assert main() == 1
    assert "The upgrade fails if all attempts fail" in caplog.text


def test_an_api_server_that_is_away_stops_the_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ApiServer(tmp_path, "serving", {}, []) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("tandem.net.observability.logs.configure_logging", lambda _: None)
    monkeypatch.setattr(keep_sizes, "SERVICE_ACCOUNT", str(server.account))
    monkeypatch.setattr(keep_sizes.sys, "argv", ["keep_sizes", "statefulsets/a=1"])
    assert main() == 1
    assert "the Kubernetes API server cannot be reached" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (ScaleAway("503"), 1), (DeadlineExceeded("no room"), LATE)],
)
def test_a_job_that_was_late_is_told_apart(
    error: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_sizes, "open_client", lambda *_: made_client())

    def run(_: Client, __: object) -> None:
        if error:
            raise error

    assert run_job(run) == status


def made_client(transport: httpx2.BaseTransport | None = None) -> Client:
    cluster = Cluster(server="https://api")
    config = KubeConfig.from_one(cluster=cluster, user=User(), namespace="here")
    return Client(config, transport=transport, trust_env=False)


GROUPS = {"f:workerGroupSpecs": {}}
HELM = {"manager": "helm", "operation": "Apply", "fieldsV1": {"f:spec": {"f:rayVersion": {}}}}
AUTOSCALER = {"manager": "python-requests", "operation": "Update", "fieldsV1": {"f:spec": GROUPS}}
OPERATOR = {
    "manager": "kuberay-operator",
    "operation": "Update",
    "subresource": "status",
    "fieldsV1": {"f:status": {"f:state": {}}},
}
PATH = "/apis/ray.io/v1/namespaces/here/rayclusters/a-ray"


def test_the_autoscaler_loses_the_groups_and_nobody_else_anything() -> None:
    assert without_patches([HELM, AUTOSCALER, OPERATOR]) == [HELM, OPERATOR]
    applied = {**HELM, "fieldsV1": {"f:spec": GROUPS}}
    assert without_patches([applied]) == [applied]


def test_other_fields_stay_with_whoever_has_patched_them() -> None:
    fields = {"f:metadata": {}, "f:spec": {**GROUPS, "f:suspend": {}}}
    (left,) = without_patches([{**AUTOSCALER, "fieldsV1": fields}])
    assert left["fieldsV1"] == {"f:metadata": {}, "f:spec": {"f:suspend": {}}}
    assert fields["f:spec"].keys() == {"f:workerGroupSpecs", "f:suspend"}  # not changed in place


class Server:
    """Has one RayCluster, and answers its first patches with `answers`."""

    def __init__(self, managers: list[dict[str, Any]] | None, *answers: int) -> None:
        self.managers = managers
        self.answers = list(answers)
        self.patches: list[dict[str, Any]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == PATH
        if self.managers is None:
            return httpx2.Response(404, json={"message": "no such RayCluster"})
        metadata = {"resourceVersion": str(len(self.patches)), "managedFields": self.managers}
        if request.method == "PATCH":
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            self.patches.append(json.loads(request.content)["metadata"])
            status = self.answers.pop(0) if self.answers else 200
            return httpx2.Response(status, json={"message": "no"})
        return httpx2.Response(200, json={"metadata": metadata})

    def run(self) -> list[dict[str, Any]]:
        with made_client(httpx2.MockTransport(self)) as client:
            run(client, ["rayclusters/a-ray"])
        return self.patches


def test_a_changed_cluster_is_read_again() -> None:
    patches = Server([HELM, AUTOSCALER], 409).run()
    assert [patch["resourceVersion"] for patch in patches] == ["0", "1"]
    assert patches[-1]["managedFields"] == [HELM]


@pytest.mark.parametrize("managers", [None, [HELM, OPERATOR]])
def test_nothing_to_do(managers: list[dict[str, Any]] | None) -> None:
    assert Server(managers).run() == []


def test_a_refusal_stops_the_upgrade() -> None:
    with pytest.raises(ScaleAway, match="403 for rayclusters/a-ray: no"):
        Server([AUTOSCALER], 403).run()


def test_a_proxy_that_answers_for_the_api_server_stops_the_upgrade() -> None:
    for answer in (httpx2.Response(503), httpx2.Response(200, text="<html>")):
        with (
            made_client(httpx2.MockTransport(lambda _, answer=answer: answer)) as client,
            pytest.raises(ScaleAway, match=r"statefulsets/a: .* cannot be read"),
        ):
            run(client, ["statefulsets/a=1"])
