"""`tandem bench serve` with stand-ins that leave what the real programs left.

The results in `tests/data/bench_serve` are those of aiperf 0.13.0 and guidellm 0.8.1 against a
cluster, without the texts. `tests/e2e/test_bench_serve.py` runs the real programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tandem_bench.serve_tools import AIPerf, GuideLLM
from tests.harness.cluster import wait_for
from tests.harness.documents import ROOT

RESULTS = ROOT / "tests" / "data" / "bench_serve"
_STAND_IN = f"""\
    #!{sys.executable}
    import re, shutil, sys
    from pathlib import Path
    name, words = Path(sys.argv[0]).name, " ".join(sys.argv)
    folder = re.search(r"--artifact-dir (\\S+)|path=(\\S+)/guidellm.json", words)
    shutil.copytree(Path("{RESULTS}") / name, folder[1] or folder[2], dirs_exist_ok=True)
"""
_FAILS = "#!/bin/sh\necho the model is too shy\nexit 3\n"
_HANGS = "#!/bin/sh\nsleep 600 & echo $! > {pid}\nwait\n"


def program(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(textwrap.dedent(text))
    (folder / name).chmod(0o755)
    return folder / name


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.ops.cli", "bench", "serve", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("name", ["aiperf", "guidellm"])
def test_it_ends_with_a_table_and_a_plot(name: str, tmp_path: Path) -> None:
    tool, picture = program(tmp_path, name, _STAND_IN), tmp_path / "served.svg"
    asked = ["--tool-path", str(tool), "--model", "m", "--tokenizer", "t", "--plot", str(picture)]
    done = serve(*asked)
    assert done.returncode == 0, done.stderr
    for row in (
        "time to first token, ms",
        "inter-token latency, ms",
        "requests/s",
        "output tokens/s",
        "requests answered",
        "requests failed",
        "Time to first token, ms",
        "Inter-token latency, ms",
    ):
        assert row in done.stdout
    assert "m by " + name in done.stdout
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("tool", [AIPerf(), GuideLLM()], ids=lambda tool: tool.name)
def test_the_figures_are_the_programs(tool: AIPerf | GuideLLM) -> None:
    measured = tool.read(RESULTS / tool.name)
    assert (measured.num_ok, measured.num_failed) == (8, 0)
    assert measured.output_tokens == 8 * 16
    assert len(measured.ttft_ms) == len(measured.inter_token_ms) == 8
    for of, samples in (
        (measured.ttft, measured.ttft_ms),
        (measured.inter_token, measured.inter_token_ms),
    ):
        assert of is not None
        assert min(samples) <= of.quantiles[50] <= of.quantiles[99] <= max(samples) * 1.001
        assert of.mean == pytest.approx(sum(samples) / 8, rel=0.01)
    assert measured.latency is not None
    assert measured.latency.mean > measured.ttft_ms[0]
    assert measured.requests_per_s == pytest.approx(8 / measured.seconds)


def test_a_programs_failure_is_told_with_its_last_words(tmp_path: Path) -> None:
    tool = program(tmp_path, "aiperf", _FAILS)
    done = serve("--tool-path", str(tool), "--model", "m", "--tokenizer", "t")
    assert done.returncode == 1
    assert "aiperf ended with 3" in done.stderr
    assert "the model is too shy" in done.stderr


def test_the_deadline_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    tool = program(tmp_path, "guidellm", _HANGS.format(pid=pid))
    done = serve("--tool-path", str(tool), "--model", "m", "--tokenizer", "t", "--deadline", "1")
    assert done.returncode == 1
    assert "not done in 1 s" in done.stderr
    wait_for(lambda: has_ended(int(pid.read_text())), deadline_s=10, what="its end")


def test_no_program_no_server_and_no_file_are_named(tmp_path: Path) -> None:
    assert "pip install aiperf" in serve("--tool-path", str(tmp_path)).stderr
    tool = program(tmp_path, "aiperf", _STAND_IN)
    done = serve("--tool-path", str(tool), "--url", "http://127.0.0.1:9")
    assert (done.returncode, "no model is served" in done.stderr) == (1, True)
    done = serve("--tool-path", str(tool), "--model", "mine")
    assert (done.returncode, "--tokenizer FOLDER" in done.stderr) == (1, True)
    done = serve("--tool-path", str(tool), "--dataset", str(tmp_path / "none"))
    assert (done.returncode, "no file" in done.stderr) == (1, True)
