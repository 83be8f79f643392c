"""Faults of the workers in a cluster of `tandem up`, and the texts that must name them.

The short test (tests/service/test_cluster_launcher.py) causes these in a cluster shared with other
tests; the long one (tests/chaos/test_explained.py) has more faults, and alerts.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.harness.cluster import wait_for
from tests.harness.surfaces import SURFACES, Seen, Surfaces, Words, problem
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
Undo = Callable[[], object]


class Faulty:
    """A running cluster of `tandem up`. `worker` is the worker that gets the faults."""

    def __init__(self, admin_url: str, folder: Path, worker: str) -> None:
        self.admin_url = admin_url
        self.folder = folder
        self.worker = worker

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.admin_url}/v1/cluster", timeout=10).json()  # type: ignore[no-any-return]

    def worker_pid(self, worker_id: str = "") -> int:
        """The pid of a worker; 0 if it does not run."""
        agents = [
            agent for pool in self.state()["pools"].values() for agent in pool.get("agents", ())
        ]
        wanted = worker_id or self.worker
        return next((int(agent["pid"]) for agent in agents if agent["id"] == wanted), 0)

    @property
    def log(self) -> Path:
        """The log of the worker that `by_hand` starts."""
        return self.folder / "by-hand.log"

    def by_hand(self, model: str = "", **environment: str) -> Undo:
        """Starts a worker without an agent, as an operator might on another machine, with the
        options of a running worker. Waits until its model is loaded."""
        worker_id = f"{self.worker.partition('-')[0]}-9"
        own = psutil.Process(self.worker_pid())
        command = own.cmdline()
        for option, value in (("--worker-id", worker_id), ("--model", model)):
            if value:
                command[command.index(option) + 1] = value
        kept = {k: v for k, v in own.environ().items() if not k.startswith("TANDEM_LOG")}
        path = self.log
        with path.open("wb") as log:
            worker = subprocess.Popen(
                command, cwd=ROOT, env={**kept, **environment}, stdout=log, stderr=log
            )

        def undo() -> None:
            worker.terminate()
            worker.wait(20)

        try:
            wait_for(lambda: "engine loaded" in path.read_text(), deadline_s=60, what=worker_id)
        except BaseException:
            undo()
            raise
        return undo


@dataclass(frozen=True)
class Fault:
    """A fault: `make` causes it, and `surfaces` must name it."""

    what: str
    make: Callable[[Any], Undo]
    words: Words
    surfaces: tuple[str, ...] = SURFACES


def look(cluster: Faulty, surfaces: Surfaces, fault: Fault) -> Seen:
    """Causes the fault, watches the surfaces for 10 s, and undoes the fault."""
    surfaces.wait_well()
    sizes = surfaces.log_sizes()
    alerts = surfaces.quiet_alerts(fault.words)
    undo = fault.make(cluster)
    try:
        return surfaces.watch(fault.words, sizes, alerts)
    finally:
        undo()


def stopped(cluster: Faulty) -> Undo:
    pid = _running(cluster)
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def killed(cluster: Faulty) -> Undo:
    os.kill(_running(cluster), signal.SIGKILL)
    return lambda: None


def _running(cluster: Faulty) -> int:
    """The pid of the worker, which is unknown until Ray runs, some seconds after `tandem up` is
    ready."""
    return int(wait_for(cluster.worker_pid, deadline_s=60, what="the pid of the worker"))


def wrong_token(cluster: Faulty) -> Undo:
    return cluster.by_hand(TANDEM_CLUSTER_TOKEN="a token of another cluster")


def other_model(cluster: Faulty) -> Undo:
    folder = cluster.folder / "other"
    if not folder.exists():
        make_tiny_model("llama", folder)
    return cluster.by_hand(str(folder))


ENDED = "ended by SIGKILL"
STOPPED = Fault("worker stopped (SIGSTOP)", stopped, problem(r"process \d+ is stopped \(SIGSTOP\)"))
KILLED = Fault("worker killed (SIGKILL)", killed, problem(ENDED, "TandemWorkerEnded"))
WRONG_TOKEN = Fault("wrong token", wrong_token, problem("token is missing or wrong"))
OTHER_MODEL = Fault("another model", other_model, problem("cannot join the cluster: its model"))
