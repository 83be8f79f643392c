"""The modules that programs load. Router and CLI stay light in ways that import-linter cannot
see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tandem

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "tandem_kernels",
    "tandem.engine",
    "tandem.worker",
    "tandem.transfer",
)


def loaded_by(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}, sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["tandem.api.server", "tandem.ops.cli", "tandem.cluster.launch.launcher"]
)
def test_the_router_and_the_launcher_load_no_engine(module: str) -> None:
    loaded = loaded_by(module)
    # The launcher computes the memory of workers with parts that need no tensor library.
    assert loaded.isdisjoint(set(HEAVY) - {"tandem.engine"})
    parts = {name for name in loaded if name.count(".") > 1 and name.startswith("tandem.engine.")}
    launcher = module == "tandem.cluster.launch.launcher"
    assert {name.split(".")[2] for name in parts} <= ({"cache", "memory"} if launcher else set())


def test_the_cli_loads_what_a_command_needs_only_when_it_runs() -> None:
    loaded = loaded_by("tandem.ops.cli")
    assert loaded.isdisjoint(("ray", "redis", "grpc", "fastapi", "numpy", "tandem.cluster"))


def test_the_simulator_is_light_too() -> None:
    heavy = set(HEAVY) - {"tandem.worker", "tandem.engine"}  # it takes pure parts from there
    loaded = loaded_by("tandem.ops.simulator.command")
    assert loaded.isdisjoint((*heavy, "ray", "grpc", "fastapi", "matplotlib"))
    parts = {name for name in loaded if name.count(".") > 1 and name.startswith("tandem.engine.")}
    assert {name.split(".")[2] for name in parts} <= {"cache", "tiers", "types"}


def test_only_the_cluster_knows_ray() -> None:
    assert "ray" not in loaded_by("tandem.api.server")
    assert "ray" not in loaded_by("tandem.cluster.launch.launcher")


def test_the_python_api_loads_no_server_and_no_network() -> None:
    loaded = loaded_by("tandem.llm")
    assert "torch" in loaded
    assert loaded.isdisjoint(("ray", "redis", "grpc", "fastapi", "uvicorn", "zmq", "transformers"))


def test_the_package_itself_loads_the_api_when_it_is_used() -> None:
    loaded = loaded_by("tandem")
    assert loaded.isdisjoint((*HEAVY, "tandem.llm", "msgspec"))
    stub = ast.parse((ROOT / "services/tandem/__init__.pyi").read_text())
    [names] = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert sorted(tandem.__all__) == sorted(alias.name for alias in names.names)
    assert all(hasattr(tandem, name) for name in tandem.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        tandem.LLMs  # noqa: B018


def test_no_module_of_ours_takes_names_of_the_package_itself() -> None:
    """They would load an engine."""
    api = "|".join(tandem.__all__)
    pattern = re.compile(rf"^\s*(import tandem\s*$|from tandem import .*\b({api})\b)", re.M)
    for folder in ("services", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(file.read_text()), file
