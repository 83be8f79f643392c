"""The guardian ends a cluster's processes, all of them and no others, when its pipe closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.processes import guardian
from tandem.common.config.cluster import CLUSTER_ID_VARIABLE

DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
# A grandchild that cleared its environment, as a tool of somebody else's might.
CHILD_WITHOUT_A_MARK = (
    "import subprocess, sys, signal; "
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'], "
    "env={}); print(child.pid, flush=True); signal.pause()"
)


def spawn(cluster_id: str, code: str) -> subprocess.Popen[str]:
    """A process of a cluster, in a session of its own, as all of them are; it has printed."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        env={CLUSTER_ID_VARIABLE: cluster_id},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) & 1 << (number - 1))


@pytest.fixture
def cluster_ids() -> Iterator[tuple[str, str]]:
    ids = uuid.uuid4().hex, uuid.uuid4().hex
    yield ids
    for cluster_id in ids:
        assert guardian.end_cluster(cluster_id, 0)


def test_ends_everything_of_its_cluster_when_the_launcher_is_gone(
    cluster_ids: tuple[str, str], tmp_path: Path
) -> None:
    mine, other = cluster_ids
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    deaf = spawn(mine, DEAF)
    parent = spawn(mine, CHILD_WITHOUT_A_MARK)
    stranger = spawn(other, DEAF)
    for child in (deaf, stranger):
        assert child.stdout is not None
        child.stdout.readline()
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    assert {deaf.pid, parent.pid, grandchild} == set(guardian.cluster_processes(mine))
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, mine, str(run_folder)],
        stdin=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    assert watcher.stdin is not None
    while not ignores(watcher.pid, signal.SIGTERM):
        assert watcher.poll() is None
    os.kill(watcher.pid, signal.SIGTERM)  # it does not go before its launcher
    began = time.monotonic()
    watcher.stdin.close()
    assert watcher.wait(5) == 0
    assert time.monotonic() - began < 5
    assert guardian.cluster_processes(mine) == {}
    assert deaf.wait(1) == -signal.SIGKILL
    assert parent.wait(1) == -signal.SIGTERM
    assert not run_folder.exists()
    assert set(guardian.cluster_processes(other)) == {stranger.pid}


def test_the_session_of_whoever_asks_is_never_taken(cluster_ids: tuple[str, str]) -> None:
    mine, _ = cluster_ids
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", DEAF],
        env={CLUSTER_ID_VARIABLE: mine},
        stdout=subprocess.PIPE,
    )
    assert os.getsid(child.pid) == os.getsid(0)
    assert child.stdout is not None
    child.stdout.readline()  # the program runs: just before that a process has no environment yet
    assert set(guardian.cluster_processes(mine)) == {child.pid}
    child.kill()
    child.wait()
    child.stdout.close()


def test_one_process_can_be_spared(cluster_ids: tuple[str, str]) -> None:
    mine, _ = cluster_ids
    spared = spawn(mine, DEAF)
    ended = spawn(mine, "import signal; signal.pause()")
    assert guardian.end_cluster(mine, 1.0, spare=spared.pid)
    assert ended.wait(1) == -signal.SIGTERM
    assert spared.poll() is None
