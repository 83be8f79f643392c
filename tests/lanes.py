"""Runs all tests in four lanes that keep two cores busy. `make test` runs it.

together   tests that start no cluster, two at a time
alone      afterwards, tests of complete clusters, one at a time
waiting    in parallel with `alone`, one at a time: tests of Ray, NIXL, networks, the wheel,
           commands, small clusters and parity, which have no short deadlines and mostly wait
idle       in parallel with all others, tests that only compute, two at a time

Clusters have deadlines, which they miss if they share cores with another busy cluster. The system
gives a core to the idle lane only while no other process wants it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
IDLE = ("tests/unit/engine", "tests/unit/kernels")
ALONE = (
    *("tests/chaos", "tests/e2e"),
    "tests/security/test_slow_connections.py",
)
WAITING = (
    *(f"tests/e2e/test_{name}.py" for name in ("documents", "gateway", "old_worker")),
    "tests/parity",
    *("tests/chart/test_run.py", "tests/chart/test_tls.py"),
    *(f"tests/security/test_{name}.py" for name in ("certificates", "fuzz")),
    *(
        f"tests/service/test_{name}.py"
        for name in ("cluster_launcher", "cluster_pools", "join", "launch_of_models")
    ),
    *(f"tests/service/test_{name}.py" for name in ("first_host_lost", "first_start")),
    "tests/service/test_network_harness.py",
    "tests/service/test_nixl_transfer.py",
    *(f"tests/service/test_{name}.py" for name in ("transfer_bench", "wheel")),
    "tests/service/worker/test_kv_events.py",
)
TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")
# Tests of the idle lane pause while clusters use all cores, so they need long time-outs.
PATIENT = ("--timeout=1500",)
# a tenth of another session's share, so that it makes progress even on a busy machine
SESSION_NICE = "10"
PR_SET_PDEATHSIG = 1


def main() -> int:
    beside = ["-p", "no:cacheprovider"]
    with ExitStack() as stack:
        shown_later = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        idle = start(
            [*IDLE, *TWO_AT_A_TIME, *PATIENT, *beside], output=shown_later[1], is_idle=True
        )
        stack.callback(idle.terminate)
        codes = [start([*but(*IDLE, *ALONE, *WAITING), *TWO_AT_A_TIME]).wait()]
        waiting = start([*WAITING, *beside], output=shown_later[0])
        stack.callback(waiting.terminate)
        codes += [start([*ALONE, *but(*WAITING)]).wait(), waiting.wait(), idle.wait()]
        for output in shown_later:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
    return int(any(codes))


def but(*paths: str) -> list[str]:
    """Builds the pytest options that exclude these files and folders."""
    return [f"--ignore={path}" for path in paths]


def start(
    arguments: Sequence[str], *, output: IO[bytes] | None = None, is_idle: bool = False
) -> subprocess.Popen[bytes]:
    """Starts pytest. `output` is where it writes; by default the output of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=output,
        preexec_fn=take_idle_cores if is_idle else None,
    )


def take_idle_cores() -> None:
    """Moves this process and its children to a new session with the lowest priority, which ends
    with its parent.

    Linux first shares cores among sessions ("autogroup"), and a cluster's processes have their own
    sessions; SCHED_IDLE alone gives way only within the same session.
    """
    os.setsid()
    with suppress(AttributeError, OSError):  # not Linux, or no autogroups
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        Path("/proc/self/autogroup").write_text(SESSION_NICE)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main())
