"""Faults of a cluster of `tandem up`, and what status, page, alerts and logs report within 10 s.

This test prints the table of docs/faults.md (`pytest -s`). test_explained_hosts.py has the faults
of hosts and links, and tests/service/test_cluster_launcher.py a short form of this test.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.cluster.processes import guardian
from tests.harness.cluster import CONTROLLER, free_port, process_named, wait_for
from tests.harness.debian import unpacked
from tests.harness.explained import (
    KILLED,
    OTHER_MODEL,
    ROOT,
    STOPPED,
    WRONG_TOKEN,
    Fault,
    Faulty,
    Undo,
    look,
)
from tests.harness.monitoring import ALERTS
from tests.harness.prometheus import Prometheus
from tests.harness.surfaces import NAMED_WITHIN_S, Surfaces, problem, report
from tests.tiny_models import make_random_speaker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKER = "decode-1"
PORTS = ("--port", "--grpc-port", "--admin-port", "--admin-grpc-port")
FAKETIME = "usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
MEMORY = Path("/sys/fs/cgroup/memory")
# Less than a worker allocates after it has loaded its modules, which count for another group.
OOM_BYTES = 8 << 20


class Up(Faulty):
    """A cluster of `tandem up` whose logs are on a small disk."""

    def __init__(self, folder: Path, model: Path, disk: Path) -> None:
        self.ports = {name: free_port() for name in PORTS}
        super().__init__(f"http://127.0.0.1:{self.ports['--admin-port']}", folder, WORKER)
        self.model = model
        self.disk = disk
        self.cluster_id = ""

    def start(self) -> subprocess.Popen[bytes]:
        options = [word for name, port in self.ports.items() for word in (name, str(port))]
        options += ["--model", str(self.model), "--prefill", "1", "--decode", "2"]
        options += ["--kv-memory", "33554432", "--no-cluster-tls"]
        with (self.folder / "screen").open("wb") as screen:
            started = subprocess.Popen(
                [sys.executable, "-m", "tandem.ops.cli", "up", *options],
                cwd=ROOT,
                env={**os.environ, "XDG_STATE_HOME": str(self.disk), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

        def is_up() -> bool:
            text = (self.folder / "screen").read_text()
            assert started.poll() is None, text
            return "Ctrl-C stops" in text

        wait_for(is_up, deadline_s=120, what="the cluster")
        self.cluster_id = self.state()["cluster_id"]
        return started

    def pid(self, name: str) -> int:
        """Finds the first process of the cluster with this text in its command line."""
        return process_named(self.cluster_id, name)

    def scale(self, size: int) -> None:
        url = f"{self.admin_url}/v1/cluster"
        httpx.post(url, json={"decode": size}, timeout=10).raise_for_status()


def out_of_memory(up: Up) -> Undo:
    """Makes Linux's OOM killer end another worker: its next process is limited to `OOM_BYTES`."""
    group = MEMORY / f"tandem-{secrets.token_hex(4)}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(OOM_BYTES))
    before = wait_for(lambda: up.worker_pid("decode-0"), deadline_s=60, what="decode-0")
    os.kill(before, signal.SIGKILL)
    pid = wait_for(lambda: _other(up, before), deadline_s=10, what="the next process")
    (group / "cgroup.procs").write_text(str(pid))
    return lambda: wait_for(lambda: _removed(group), deadline_s=10, what="an empty group")


def _other(up: Up, before: int) -> int:
    """The pid of the process that replaced `before`; 0 while there is none."""
    return 0 if (pid := up.worker_pid("decode-0")) == before else pid


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def loads_for_ever(up: Up) -> Undo:
    """Stops the engine of a third decode worker before it has loaded anything."""
    up.scale(3)
    pid = wait_for(lambda: up.worker_pid("decode-2"), deadline_s=20, what="decode-2")
    engine, *_ = wait_for(psutil.Process(pid).children, deadline_s=20, what="its engine")
    engine.suspend()

    def undo() -> None:
        engine.resume()
        up.scale(2)

    return undo


def redis_gone(up: Up) -> Undo:
    """Stops Redis with SIGSTOP, because a Redis that ends is restarted at once."""
    pid = up.pid("valkey-server")
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def head_gone(up: Up) -> Undo:
    os.kill(up.pid("gcs/gcs_server"), signal.SIGKILL)
    return lambda: None


def controller_gone(up: Up) -> Undo:
    pid = up.pid(CONTROLLER)
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def controller_killed(up: Up) -> Undo:
    """Kills the controller, which head.py restarts at once."""
    os.kill(up.pid(CONTROLLER), signal.SIGKILL)
    return lambda: None


def disk_full(up: Up) -> Undo:
    file = up.disk / "full"
    with file.open("wb") as stream:
        room = os.statvfs(up.disk)
        os.posix_fallocate(stream.fileno(), 0, room.f_bavail * room.f_frsize)
    return file.unlink


def clock_off(up: Up) -> Undo:
    library = str(unpacked("libfaketime", FAKETIME))
    clock = {"FAKETIME": "+5m", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return up.by_hand(LD_PRELOAD=library, **clock)


FAULTS = [
    STOPPED,
    KILLED,
    Fault("worker out of memory", out_of_memory, problem("OOM killer", "TandemWorkerEnded")),
    Fault(
        "worker loads for ever",
        loads_for_ever,
        problem("no progress for", "TandemWorkerLoads"),
        surfaces=("page", "status", "alert"),  # a log reports it only after 30 s
    ),
    Fault("Redis gone", redis_gone, problem("Redis does not answer", "TandemRedisLost")),
    Fault("Ray's head gone", head_gone, problem("gcs_server ended", "TandemControllerSilent")),
    Fault(
        "pool controller stopped",
        controller_gone,
        problem("pool controller has not reported", "TandemControllerSilent"),
    ),
    Fault(
        "pool controller killed",
        controller_killed,
        problem("pool controller was restarted", "TandemControllerSilent"),
        surfaces=("page", "status", "log"),
    ),
    Fault(
        "disk full",
        disk_full,
        problem("the disk of its logs .* is full"),
        surfaces=("page", "status", "alert"),  # the log is on the full disk
    ),
    Fault("clock off by 5 minutes", clock_off, problem("its clock is (300|299|301) s ahead")),
    WRONG_TOKEN,
    OTHER_MODEL,
]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a file system of 16 MB in memory."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextmanager
def running(folder: Path, disk: Path) -> Iterator[tuple[Up, Surfaces]]:
    up = Up(folder, make_random_speaker(folder / "model").path, disk)
    with ExitStack() as ends:
        started = up.start()
        ends.callback(_end, started, up)
        workers = [w["metrics_address"] for w in up.state()["workers"]]
        targets = {"routers": [up.admin_url.removeprefix("http://")], "workers": workers}
        prometheus = ends.enter_context(Prometheus(folder, targets, ALERTS))
        logs = [*disk.glob("tandem/runs/*"), up.log, folder / "screen"]
        surfaces = Surfaces(up.admin_url, logs, prometheus)
        ends.callback(surfaces.close)
        yield up, surfaces


def _end(started: subprocess.Popen[bytes], up: Up) -> None:
    started.terminate()
    started.wait(30)
    wait_for(lambda: not guardian.cluster_processes(up.cluster_id), deadline_s=20, what="the end")


def test_each_fault_is_named_by_the_page_the_status_an_alert_and_a_log(tmp_path: Path) -> None:
    wanted = os.environ.get("FAULTS", "")
    faults = [fault for fault in FAULTS if wanted in fault.what]
    unnamed = []
    with small_disk(tmp_path / "disk") as disk, running(tmp_path, disk) as (up, surfaces):
        for fault in faults:
            seen = look(up, surfaces, fault)
            if missing := set(report(fault.what, seen)) & set(fault.surfaces):
                unnamed.append((fault.what, missing, surfaces.page.lines(time.time() - 30)))
    assert not unnamed, f"not said within {NAMED_WITHIN_S:g} s: {unnamed}"
