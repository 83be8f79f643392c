"""The system tells how processes ended that are nobody's children."""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.common.process import endings

SPAWN = """
import sys
from subprocess import DEVNULL, Popen
print(Popen(sys.argv[1:], stdout=DEVNULL, stderr=DEVNULL).pid)
"""
_NUMBERS = platform.release().split("-")[0].split(".")[:2]
KERNEL = tuple(int(n) for n in _NUMBERS if n.isdecimal())


@contextmanager
def orphan(*command: str) -> Iterator[tuple[int, int]]:
    """A process whose parent has ended, and its pidfd."""
    made = [sys.executable, "-S", "-c", SPAWN, *command]
    pid = int(subprocess.run(made, capture_output=True, check=True).stdout)
    pidfd = os.pidfd_open(pid)
    try:
        yield pid, pidfd
    finally:
        os.close(pidfd)


@pytest.mark.skipif(KERNEL < (6, 15), reason="this kernel tells nobody but the parent")
def test_a_killed_process_and_one_that_failed_are_told_apart() -> None:
    with orphan("sleep", "60") as (pid, pidfd):
        assert not endings.is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        give_up_at = time.monotonic() + 5
        while not endings.is_stopped(pid):
            assert time.monotonic() < give_up_at
        os.kill(pid, signal.SIGKILL)
        _wait(pidfd)
        assert endings.ending(pid, pidfd, endings.oom_kills()) == "ended by SIGKILL"
        assert not endings.is_stopped(pid)
    with orphan("sh", "-c", "sleep 0.3; exit 3") as (pid, pidfd):
        _wait(pidfd)
        assert endings.ending(pid, pidfd, None) == "exit status 3"


def _wait(pidfd: int) -> None:
    assert select.select([pidfd], [], [], 10)[0]


def test_a_kill_for_want_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "oom_kills", lambda: 5)
    assert "OOM killer" in endings.describe_exit(-9, 4)
    assert endings.describe_exit(-9, 5) == "ended by SIGKILL"
    assert endings.describe_exit(-9, None) == "ended by SIGKILL"
    assert endings.describe_exit(-11, 4) == "ended by SIGSEGV"
