"""The modules that programs load. Router and CLI stay light in ways that import-linter cannot
see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert loaded_by(module).isdisjoint(HEAVY)


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
