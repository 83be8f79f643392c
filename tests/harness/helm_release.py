"""A release of the chart, installed by real Helm into a stand-in for the API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm_python import Config

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
NO_KEYS = {"tls": {"internal": {"enabled": False}}}  # creating certificates takes seconds


@dataclass
class Release:
    """The installed chart."""

    server: HelmServer
    helm: Config

    def upgrade(self, values: dict[str, Any]) -> None:
        self.helm.upgrade(CHART, RELEASE, NO_KEYS | values, namespace=NAMESPACE, timeout=60)

    def scale(self, name: str, replicas: int) -> None:
        self.server.scale(OBJECTS[name], replicas)

    def size(self, name: str) -> int:
        return int(self.server.objects[OBJECTS[name]]["spec"]["replicas"])


@contextmanager
def installed(
    chart: Path, server: HelmServer | None = None, *, num_decode: int = 2
) -> Iterator[Release]:
    """Installs a chart and yields its release."""
    with server or HelmServer() as server:
        address = f"http://127.0.0.1:{server.port}"
        helm = Config(kube_apiserver=address, namespace=NAMESPACE, storage_driver="memory")
        values = NO_KEYS | {"decode": {"replicas": num_decode}}
        helm.install(chart, RELEASE, values, namespace=NAMESPACE)
        yield Release(server, helm)
        helm.close()
