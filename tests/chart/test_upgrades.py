"""Upgrades by real Helm, by server-side apply, into a stand-in for the API server: sizes, and the
chart before this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config, HelmError

from tests.harness.chart import CHART, NAMESPACE, RELEASE, component_of
from tests.harness.helm_server import HelmServer

OBJECTS = {
    name: f"/apis/apps/v1/namespaces/{NAMESPACE}/{resource}/{RELEASE}-tandem-{name}"
    for name, resource in (
        ("prefill", "statefulsets"),
        ("decode", "statefulsets"),
        ("router", "deployments"),
    )
}

# As `helm package` made it, of commit a4502884: no release is older.
BEFORE = Path(__file__).parents[1] / "data" / "charts" / "tandem-0.1.0.tgz"
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


@contextmanager
def installed(chart: Path) -> Iterator[Release]:
    with HelmServer() as server:
        address = f"http://127.0.0.1:{server.port}"
        helm = Config(kube_apiserver=address, namespace=NAMESPACE, storage_driver="memory")
        values = NO_KEYS | {"decode": {"replicas": 2}}
        helm.install(chart, RELEASE, values, namespace=NAMESPACE)
        yield Release(server, helm)
        helm.close()


@pytest.fixture
def release() -> Iterator[Release]:
    with installed(CHART) as made:
        yield made


@pytest.fixture
def release_before() -> Iterator[Release]:
    with installed(BEFORE) as made:
        yield made


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


def selectors(server: HelmServer) -> dict[str, Any]:
    """Returns the labels by which each object selects pods, by its path."""
    specs = {path: made.get("spec", {}) for path, made in server.objects.items()}
    return {
        path: spec.get("selector") or spec.get("podSelector")
        for path, spec in specs.items()
        if spec.get("selector") or spec.get("podSelector")
    }


def test_the_chart_before_is_upgraded_and_its_pods_stay_selected(release_before: Release) -> None:
    """The stand-in refuses changes of fields that nobody may change, as the API server does."""
    server = release_before.server
    before, objects = selectors(server), dict(server.objects)
    release_before.upgrade({"decode": {"replicas": 2}, "logLevel": "DEBUG"})
    after = selectors(server)
    assert {path: after[path] for path in before} == before
    assert len(before) > 8
    secrets = [path for path in objects if "/secrets/" in path and "data" in objects[path]]
    assert any(path.endswith("-api-keys") for path in secrets)
    for path in secrets:  # keys and tokens that clients and pods have
        assert server.objects[path]["data"] == objects[path]["data"], path
    pool = server.objects[OBJECTS["decode"]]
    assert component_of(pool) == "decode"
    assert "DEBUG" in str(pool["spec"]["template"])


def test_sizes_of_the_chart_before_are_kept_if_somebody_set_them(release_before: Release) -> None:
    assert "tandem.dev/replicas" not in str(release_before.server.objects)
    release_before.scale("decode", 0)
    release_before.scale("router", 5)
    release_before.upgrade({"decode": {"replicas": 2}, "prefill": {"replicas": 3}})
    assert [release_before.size(name) for name in OBJECTS] == [3, 0, 5]


@pytest.mark.parametrize("field", ["serviceName", "podManagementPolicy", "selector"])
def test_the_stand_in_refuses_what_nobody_may_change(release: Release, field: str) -> None:
    spec = release.server.objects[OBJECTS["decode"]]["spec"]
    spec[field] = {"matchLabels": {"a": "b"}} if field == "selector" else "another"
    with pytest.raises(HelmError, match="Invalid"):
        release.upgrade({"decode": {"replicas": 2}})
