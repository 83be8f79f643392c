"""Programs that are told to end while they load, as a container's first process, or do not end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.cluster import wait_for

# A package that takes for ever to load, in place of one that each program needs.
SLOW = "import pathlib, time\npathlib.Path({marker!r}).touch()\ntime.sleep(600)\n"
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")
SETTINGS = {
    "TANDEM_CLUSTER_ID": "c",
    "TANDEM_REDIS_URL": "redis://127.0.0.1:1",
    "TANDEM_CLUSTER_TOKEN": "t",
}


def may_unshare() -> bool:
    """Returns whether this machine lets us make a PID namespace, which root may."""
    if not shutil.which(UNSHARE[0]):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.service
in_container = pytest.mark.skipif(not may_unshare(), reason="no PID namespaces for us here")


@pytest.fixture
def loading(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[psutil.Process]:
    """The first process of a PID namespace: a program that loads."""
    program, package, options = request.param
    marker = tmp_path / "loads"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(SLOW.format(marker=str(marker)))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [*UNSHARE, "--kill-child", sys.executable, "-m", program, *options],
        env={**os.environ, **SETTINGS, "PYTHONPATH": path},
    ) as started:
        wait_for(marker.exists, deadline_s=60, what=f"{program} to load")
        (first,) = psutil.Process(started.pid).children()
        yield first
        started.kill()


WORKER = ("tandem.worker", "zmq", ("--role", "decode", "--model", "m"))
ROUTER = ("tandem.router", "fastapi", ("--router-id", "r", "--model", "m"))


@in_container
@pytest.mark.parametrize("loading", [WORKER, ROUTER], ids=["worker", "router"], indirect=True)
def test_it_ends_at_once(loading: psutil.Process) -> None:
    """The kernel drops a signal that such a process has no handler for."""
    loading.send_signal(signal.SIGTERM)
    loading.wait(30)


# A worker whose drain is over and that does not come to its end.
STUCK = """
import asyncio, pathlib, sys
from types import SimpleNamespace
from tandem.worker import __main__ as command
from tandem.worker.engine_process.program import ENGINE_MODULE
from tandem.worker.lifecycle import worker

class Stuck:
    def __init__(self, config, servicer, engine): self.config = config
    def stop(self, deadline_s): pass
    async def run(self):
        pathlib.Path(sys.argv[1]).touch()
        await asyncio.Event().wait()

worker.Worker = Stuck
command._CLOSE_MAX_S = 0.2
asyncio.run(command._run(SimpleNamespace(drain_deadline_s=0.2), ENGINE_MODULE))
"""


def test_a_worker_that_does_not_end_says_where_it_stands_and_ends(tmp_path: Path) -> None:
    marker = tmp_path / "runs"
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(marker)], stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            wait_for(marker.exists, deadline_s=60, what="the worker to run")
            started.terminate()
            _, words = started.communicate(timeout=30)
        finally:
            started.kill()
    assert started.returncode == 1
    assert "Timeout" in words
    assert "selectors.py" in words
