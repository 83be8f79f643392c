"""A thread that breaks takes its process along, and one that ends does not."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("body", "status"), [("1 / 0", 1), ("None", 0)])
def test_the_process_ends_with_a_thread_that_breaks(body: str, status: int) -> None:
    script = (
        "import time\n"
        "from tandem.cluster.processes import vital_thread\n"
        "vital_thread._PAUSE_S = 0.0\n"
        f"vital_thread.start_vital('pools', lambda: {body})\n"
        f"time.sleep({600 if status else 0.5})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert ("the thread pools failed" in done.stderr) == bool(status)
