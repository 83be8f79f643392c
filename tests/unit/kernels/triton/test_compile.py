"""Every kernel compiles for the architectures that it is written for, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (90, ["-s"]),
        pytest.param(80, [], marks=pytest.mark.slow),
        pytest.param(90, ["-v"], marks=pytest.mark.slow),
    ],
)
def test_compiles_without_spilling_much(arch: int, options: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), str(arch), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        assert int(line.split("registers")[1].split()[0]) <= 512, line
