"""Runs all tests in four lanes, so that two cores always have work; `make test` runs it.

    together   tests that start no cluster, two at a time
    alone      afterwards, tests of whole clusters, one at a time
    waiting    beside `alone`, one at a time: tests of Ray, NIXL, networks, the wheel, commands,
               small clusters and parity, which have no short deadlines and mostly wait
    idle       beside all, tests that only compute, two at a time

Clusters have deadlines, which they miss on cores that they share with another busy cluster. The
system gives a core to the idle lane only while no other process wants it.
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
    *(f"tests/service/test_{name}.py" for name in ("cluster_launcher", "cluster_pools", "join")),
    *(f"tests/service/test_{name}.py" for name in ("first_host_lost", "network_harness")),
    "tests/service/test_nixl_transfer.py",
    *(f"tests/service/test_{name}.py" for name in ("transfer_bench", "wheel")),
    "tests/service/worker/test_kv_events.py",
)
TWO_AT_A_TIME = ("-n", "2", "--dist", "worksteal")
# A test of the idle lane stands still while clusters need all cores: its own waits are long, too.
PATIENT = ("--timeout=1500",)
SESSION_NICE = "10"  # a tenth of another session's share: on a machine that is never idle, it ends
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
    """Returns pytest's options that leave out these files and folders."""
    return [f"--ignore={path}" for path in paths]


def start(
    arguments: Sequence[str], *, output: IO[bytes] | None = None, is_idle: bool = False
) -> subprocess.Popen[bytes]:
    """Starts pytest. `output`: where it writes, by default to this process's own."""
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
    """Puts this process and its children behind all others, in a session that ends with its parent.

    Linux shares cores among sessions first ("autogroup"), and the processes of a cluster are in
    sessions of their own: SCHED_IDLE keeps a process behind those of its own session alone.
    """
    os.setsid()
    with suppress(AttributeError, OSError):  # of another system than Linux, or one without groups
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        Path("/proc/self/autogroup").write_text(SESSION_NICE)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    sys.exit(main())
