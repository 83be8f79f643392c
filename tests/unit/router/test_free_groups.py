"""The worker groups of a RayCluster before an upgrade; docs/kubernetes.md has real upgrades.

Here an HTTP transport in the process takes the place of the API server.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.errors import ScaleAway
from tandem.router.scaling.free_groups import without_patches
from tandem.router.scaling.keep_sizes import run

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

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == PATH
        if self.managers is None:
            return httpx.Response(404)
        metadata = {"resourceVersion": str(len(self.patches)), "managedFields": self.managers}
        if request.method == "PATCH":
            assert request.headers["Content-Type"] == "application/merge-patch+json"
            self.patches.append(json.loads(request.content)["metadata"])
            status = self.answers.pop(0) if self.answers else 200
            return httpx.Response(status, json={"message": "no"})
        return httpx.Response(200, json={"metadata": metadata})

    async def run(self) -> list[dict[str, Any]]:
        base = "https://api/apis/apps/v1/namespaces/here"
        transport = httpx.MockTransport(self)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            await run(client, ["rayclusters/a-ray"])
        return self.patches


async def test_a_changed_cluster_is_read_again() -> None:
    patches = await Server([HELM, AUTOSCALER], 409).run()
    assert [patch["resourceVersion"] for patch in patches] == ["0", "1"]
    assert patches[-1]["managedFields"] == [HELM]


@pytest.mark.parametrize("managers", [None, [HELM, OPERATOR]])
async def test_nothing_to_do(managers: list[dict[str, Any]] | None) -> None:
    assert await Server(managers).run() == []


async def test_a_refusal_stops_the_upgrade() -> None:
    with pytest.raises(ScaleAway, match="403 for rayclusters/a-ray: no"):
        await Server([AUTOSCALER], 403).run()
