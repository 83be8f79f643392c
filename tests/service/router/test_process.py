"""The router as people start it: `tandem router`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.common.config.cluster import ClusterConfig
from tests.harness.cluster import free_port, wait_for

pytestmark = pytest.mark.service

FORBIDDEN = ("torch", "ray", "transformers", "tandem.engine", "tandem.worker", "kernels")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster_config: ClusterConfig, tmp_path: Path) -> Iterator[Start]:
    started = []

    def run(
        *options: str,
        program: tuple[str, ...] = ("-m", "tandem.router"),
        variables: dict[str, str] | None = None,
    ) -> object:
        environment = {
            **os.environ,
            "TANDEM_CLUSTER_ID": cluster_config.cluster_id,
            "TANDEM_REDIS_URL": cluster_config.redis_url,
            "TANDEM_CLUSTER_TOKEN": cluster_config.token,
            **(variables or {}),
        }
        command = [sys.executable, *program, "--model", "smollm2", *options]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


def ports(**taken: int) -> tuple[str, ...]:
    """Free ports; `taken` has others, such as `admin_port`."""
    found = {"http_port": free_port(), "grpc_port": free_port(), "admin_port": 0, **taken}
    found.setdefault("admin_grpc_port", 0)
    return tuple(x for k, v in found.items() for x in (f"--{k.replace('_', '-')}", str(v)))


def answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_starts_quickly_waits_for_workers_and_ends_in_order(start: Start) -> None:
    options = ports()
    process = start(*options)
    wait_for(lambda: answers(options[1]), deadline_s=20, what="the router")
    url = f"http://127.0.0.1:{options[1]}"

    def reason() -> str:
        answer = httpx.get(f"{url}/ready", timeout=5)
        assert answer.status_code == 503
        return str(answer.json()["error"]["message"])

    wait_for(lambda: reason() == "no decode worker is ready", deadline_s=60, what="the model")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_a_killed_router_leaves_no_tokenizer_process(start: Start) -> None:
    options = ports()
    process = start(*options)
    children = wait_for(
        lambda: psutil.Process(process.pid).children(recursive=True),
        deadline_s=60,
        what="a tokenizer process",
    )
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


@pytest.mark.parametrize(
    "variables",
    [
        {"TANDEM_CLUSTER_ID": ""},
        {"TANDEM_REDIS_URL": ""},
        {"TANDEM_CLUSTER_TOKEN": ""},
        {"TANDEM_REDIS_URL": "http://nowhere"},
        {"TANDEM_LOG_FORMAT": "xml"},
        {"TANDEM_LOG_LEVEL": "loud"},
    ],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_a_wrong_variable_is_status_2_and_one_line(start: Start, variables: dict[str, str]) -> None:
    process = start(*ports(), variables=variables)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    (name,) = variables
    assert name in errors or "Redis URL" in errors


def test_a_wrong_option_is_status_2(start: Start) -> None:
    process = start("--http-port", "x")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("which", ["http", "grpc", "admin", "admin-grpc"])
def test_a_taken_port_is_named(start: Start, which: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(*ports(**{f"{which.replace('-', '_')}_port": port}))
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in errors
    assert f"--{which}-port" in errors
    assert "Traceback" not in errors


def test_an_unknown_model_is_one_line(start: Start) -> None:
    process = start(*ports(), "--model", "/nowhere/at/all")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "/nowhere/at/all is not a model" in errors
    assert "Traceback" not in errors


def test_never_loads_what_it_must_not(start: Start) -> None:
    """Looks at sys.modules of a router that served, through an exit hook of its own process."""
    hook = (
        "import atexit, sys; "
        "atexit.register(lambda: print('MODULES', *sorted(sys.modules), file=sys.stderr)); "
        "from tandem.router.__main__ import main; sys.exit(main())"
    )
    options = ports()
    process = start(*options, program=("-c", hook))
    wait_for(lambda: answers(options[1]), deadline_s=20, what="the router")
    url = f"http://127.0.0.1:{options[1]}"
    wait_for(
        lambda: httpx.get(f"{url}/v1/models", timeout=5).json()["data"],
        deadline_s=60,
        what="the model",
    )
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    modules = errors.rpartition("MODULES")[2].split()
    assert "tandem.api.server" in modules
    loaded = [m for m in modules for name in FORBIDDEN if f"{m}.".startswith(f"{name}.")]
    assert not loaded
