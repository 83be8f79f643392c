"""`benchmarks/gpu/kernels.py` loads where only torch, Triton and safetensors are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ABSENT = (
    "ray",
    "nixl",
    "nixl_cu12",
    "redis",
    "fastapi",
    "msgspec",
    "zmq",
    "grpc",
    "typer",
    "cyclopts",
)


def test_it_needs_no_part_of_the_cluster() -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import benchmarks.gpu.kernels"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)
