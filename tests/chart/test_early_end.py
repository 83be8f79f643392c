"""A container that is told to end before Python has loaded ends at once, not with its grace period.

Its program is the first process of a PID namespace, for which the kernel drops a signal without a
handler. The command lines are the chart's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.chart import command_line, container, render
from tests.harness.cluster import wait_for

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def may_unshare() -> bool:
    """Returns whether this machine lets us make a PID namespace, which root may."""
    if not shutil.which(UNSHARE[0]):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(not may_unshare(), reason="no PID namespaces for us here"),
]


def blocks_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (blocked,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("component", "name"), [("decode", "worker"), ("router", "router"), ("redis", "tls")]
)
def test_a_container_told_before_its_program_has_loaded_ends(
    component: str, name: str, tmp_path: Path
) -> None:
    command = command_line(container(render(), component, name), {})
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    gate = tmp_path / "gate"  # Python loads no further before it is open
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(f"open({str(gate)!r}).close()\n")
    modules = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": modules}
    with subprocess.Popen([*UNSHARE, *command], env=environment) as started:
        try:
            shell = psutil.Process(started.pid)
            wait_for(shell.children, deadline_s=30, what="the first process")
            (first,) = shell.children()
            # `unshare` also blocks SIGTERM for a moment, before it starts the program.
            wait_for(
                lambda: first.name() != "unshare" and blocks_sigterm(first.pid),
                deadline_s=30,
                what="the first program",
            )
            first.send_signal(signal.SIGTERM)
            opened = os.open(gate, os.O_RDWR)  # waits for no reader
            try:
                assert started.wait(30) == 128 + signal.SIGTERM
            finally:
                os.close(opened)
        finally:
            started.kill()
