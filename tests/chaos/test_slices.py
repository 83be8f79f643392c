"""A few short slices of `tests/chaos/slices.py`, which runs very many requests.

The script combines all kinds of faults, of workers and other processes. It fails on a wrong token,
a failed request, KV that is still held, and a logged error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.network import why_not

ROOT = Path(__file__).parents[2]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_slices_have_no_problem_and_the_second_run_goes_on_after_the_first(tmp_path: Path) -> None:
    books = tmp_path / "books.json"
    for num_requests, more in ((300, ()), (600, ("--keep-router",))):
        command = [
            sys.executable,
            "-m",
            "tests.chaos.slices",
            "--slice",
            "300",
            "--books",
            books,
            *more,
        ]
        done = subprocess.run(
            [*command, "--requests", str(num_requests)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        assert json.loads(books.read_text())["sums"]["requests"] == num_requests
    assert json.loads(books.read_text())["slices"][1]["is_counted"]
