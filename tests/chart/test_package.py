"""The chart as an archive, and as an artifact in an OCI registry."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helm_python import Chart
from helm_python.chart import package
from helm_python.registry import RegistryClient

from tests.harness.chart import CHART, NAMESPACE, RELEASE
from tests.harness.cluster import free_port, wait_for

REGISTRY = shutil.which("docker-registry")  # Debian's package of that name: CNCF Distribution
VALUES = {  # without what is drawn anew each time
    "tls": {"internal": {"enabled": False}},
    "apiKeys": {"existingSecret": "keys"},
    "monitoring": {"rules": True, "dashboards": True},
}
SETTINGS = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


def is_whole(archive: Path) -> bool:
    """Returns whether an archive renders what the chart's folder does; its secrets are drawn."""
    packed = Chart.load(archive)
    rendered = packed.render(VALUES, name=RELEASE, namespace=NAMESPACE)
    folder = Chart.load(CHART).render(VALUES, name=RELEASE, namespace=NAMESPACE)
    drawn = "tandem/templates/secrets.yaml"
    assert drawn in rendered
    return {k: v for k, v in rendered.items() if k != drawn} == {
        k: v for k, v in folder.items() if k != drawn
    }


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(package(CHART, destination=tmp_path_factory.mktemp("packed")))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of a real registry."""
    assert REGISTRY
    port = free_port()
    settings = tmp_path / "registry.yml"
    settings.write_text(SETTINGS.format(folder=tmp_path / "store", port=port))
    with subprocess.Popen(
        [REGISTRY, "serve", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        address = f"127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"http://{address}/v2/").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(answers, deadline_s=30, what="the registry")
            yield address
        finally:
            process.terminate()


def test_the_archive_has_all_of_the_chart(archive: Path) -> None:
    assert is_whole(archive)


@pytest.mark.skipif(not REGISTRY, reason="docker-registry is not installed")
def test_a_registry_gives_back_what_was_pushed(
    archive: Path, registry: str, tmp_path: Path
) -> None:
    at = f"{registry}/charts"
    with RegistryClient(plain_http=True, credentials_file=tmp_path / "credentials") as client:
        client.push(archive, f"oci://{at}", plain_http=True)
        assert client.tags(f"{at}/tandem") == ["0.1.0"]
        client.pull(f"oci://{at}/tandem", version="0.1.0", destination=tmp_path, plain_http=True)
    pulled = tmp_path / archive.name
    assert pulled.read_bytes() == archive.read_bytes()
    assert is_whole(pulled)
