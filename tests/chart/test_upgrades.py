"""Sizes over upgrades: real Helm, by server-side apply, into a stand-in for the API server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from helm_python import Config, HelmError

from tests.harness.chart import CHART, NAMESPACE, RELEASE
from tests.harness.helm_server import HelmServer

OBJECTS = {
    name: f"/apis/apps/v1/namespaces/{NAMESPACE}/{resource}/{RELEASE}-tandem-{name}"
    for name, resource in (
        ("prefill", "statefulsets"),
        ("decode", "statefulsets"),
        ("router", "deployments"),
    )
}


NO_KEYS = {"tls": {"internal": {"enabled": False}}}  # making them takes seconds


@dataclass
class Release:
    """The chart, installed."""

    server: HelmServer
    helm: Config

    def upgrade(self, values: dict[str, Any]) -> None:
        self.helm.upgrade(CHART, RELEASE, NO_KEYS | values, namespace=NAMESPACE)

    def scale(self, name: str, replicas: int) -> None:
        self.server.scale(OBJECTS[name], replicas)

    def size(self, name: str) -> int:
        return int(self.server.objects[OBJECTS[name]]["spec"]["replicas"])


@pytest.fixture
def release() -> Iterator[Release]:
    with HelmServer() as server:
        address = f"http://127.0.0.1:{server.port}"
        helm = Config(kube_apiserver=address, namespace=NAMESPACE, storage_driver="memory")
        values = NO_KEYS | {"decode": {"replicas": 2}}
        helm.install(CHART, RELEASE, values, namespace=NAMESPACE)
        yield Release(server, helm)
        helm.close()


@pytest.mark.parametrize("name", OBJECTS)
def test_an_upgrade_keeps_a_size_that_was_set_meanwhile(release: Release, name: str) -> None:
    release.scale(name, 5)
    release.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG"})
    assert release.size(name) == 5


def test_a_pool_of_none_stays_empty(release: Release) -> None:
    release.scale("decode", 0)
    release.upgrade({"decode": {"replicas": 2}})
    assert release.size("decode") == 0


def test_a_changed_value_is_the_new_size(release: Release) -> None:
    assert release.size("decode") == 2
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3


def test_a_changed_value_and_a_size_that_was_set_meanwhile_conflict(release: Release) -> None:
    release.scale("decode", 5)
    with pytest.raises(HelmError, match="conflict occurred"):
        release.upgrade({"decode": {"replicas": 3}})
    release.scale("decode", 3)
    release.upgrade({"decode": {"replicas": 3}})
    assert release.size("decode") == 3


@pytest.mark.parametrize("owner", ["other", "hpa"])
def test_a_new_owner_takes_over_the_size_that_is_there(release: Release, owner: str) -> None:
    pool: dict[str, Any] = {"sizeOwner": owner}
    if owner == "hpa":
        cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
        pool["hpa"] = {"metrics": [{"type": "Resource", "resource": cpu}]}
    for _ in range(2):
        release.upgrade({"decode": pool})
        assert release.size("decode") == 2
    release.scale("decode", 6)
    release.upgrade({"decode": pool})
    assert release.size("decode") == 6
