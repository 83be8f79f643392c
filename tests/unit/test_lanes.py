"""Every test that starts a cluster is in a lane that runs one test at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import ALONE, IDLE, ROOT, SESSION_NICE, WAITING, take_idle_cores

STARTS = re.compile(
    r"\b(LocalCluster|running_cluster|start_ways|KeptCluster|HeadProcess|LocalPods|Network|serving)\("
)


def test_tests_that_start_a_cluster_run_one_at_a_time() -> None:
    alone = [ROOT / path for path in (*ALONE, *WAITING)]
    together = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if STARTS.search(path.read_text()) and not any(map(path.is_relative_to, alone))
    }
    assert together == set()


def test_the_lanes_name_what_there_is() -> None:
    missing = [path for path in (*ALONE, *WAITING, *IDLE) if not Path(ROOT, path).exists()]
    assert missing == []


def test_the_idle_lane_is_behind_other_sessions_and_behind_its_own() -> None:
    group = Path("/proc/self/autogroup")
    if not (group.exists() and group.read_text()):
        pytest.skip("this Linux shares cores without a look at sessions")
    asks = f"import os; print(os.sched_getscheduler(0), open({str(group)!r}).read())"
    shown = subprocess.run(
        [sys.executable, "-c", asks],
        preexec_fn=take_idle_cores,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert (shown[0], shown[-1]) == (str(os.SCHED_IDLE), SESSION_NICE)
    assert shown[1] != group.read_text().split()[0]
