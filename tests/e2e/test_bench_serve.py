"""`tandem bench serve` with the real programs, each in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conformance.run_clients import CLIENTS, install
from tests.harness.cluster import LocalCluster


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("tool", ["aiperf", "guidellm"])
def test_the_real_programs_measure_a_cluster(
    cluster: LocalCluster, tmp_path: Path, tool: str, api: str
) -> None:
    kept = Path(tempfile.gettempdir()) / "tandem-clients"
    environment = install(CLIENTS / f"use_{tool}.py", kept).parent.parent
    command = [sys.executable, "-m", "tandem.ops.cli", "bench", "serve", "--url", cluster.url]
    command += ["--tool", tool, "--tool-path", str(environment), "--api", api]
    command += ["--requests", "6", "--concurrency", "2"]
    command += ["--input-tokens", "60", "--output-tokens", "12"]
    command += ["--plot", str(tmp_path / "served.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.count("│") > 2]
    told = {name.strip(): value.strip() for name, value in rows}
    assert (told["requests answered"], told["requests failed"]) == ("6", "0")
    assert float(told["time to first token, ms"]) > float(told["inter-token latency, ms"]) > 0
    assert (tmp_path / "served.png").stat().st_size > 1000
