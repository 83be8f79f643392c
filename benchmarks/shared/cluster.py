"""Clusters of `tandem up`, as their clients and operators reach them."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.cluster.processes.guardian import cluster_processes
from tandem.common.config.cluster import ClusterConfig

START_DEADLINE_S = 180.0
ROOT = Path(__file__).parents[2]
_PORTS = ("--port", "--grpc-port", "--admin-port", "--admin-grpc-port")
_HELD = ("num_running", "num_waiting", "num_leases", "num_pulls")


def wait_for(
    probe: Callable[[], Any], *, deadline_s: float, what: str, interval_s: float = 0.02
) -> None:
    """Polls until `probe` returns something true. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + deadline_s
    while not probe():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(interval_s)


def free_port() -> int:
    """Returns a free port outside those that the system gives to clients and Ray to its workers."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Cluster:
    """A running cluster, whose logs lie in `folder`."""

    url: str
    admin_url: str
    grpc_address: str
    process: subprocess.Popen[bytes]
    folder: Path
    start_s: float = 0.0  # from the start of the command until the cluster is ready

    def state(self) -> dict[str, Any]:
        """Returns the reply of `/v1/cluster`."""
        answer = httpx.get(f"{self.admin_url}/v1/cluster", timeout=10)
        return dict(answer.raise_for_status().json())

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the workers by id, as the router sees them."""
        return {worker["worker_id"]: worker for worker in self.state()["workers"]}

    def metric(self, name: str, role: str = "") -> float:
        """Returns the sum of this metric over all workers, or over those of a role."""
        total = 0.0
        for worker in self.state()["workers"]:
            if worker["role"].startswith(role):
                text = httpx.get(f"http://{worker['metrics_address']}/metrics", timeout=10).text
                lines = (line for line in text.splitlines() if line.partition("{")[0] == name)
                total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        return total

    def tandem(self, *arguments: str) -> str:
        """Runs an operator's command on the cluster, and returns what it prints."""
        command = [sys.executable, "-m", "tandem.ops.cli", *arguments, "--url", self.admin_url]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def scale(self, **sizes: int) -> None:
        """Gives pools these sizes, and waits until all their workers are ready."""
        wanted = [f"{role}={size}" for role, size in sizes.items()]
        self.tandem("scale", *wanted, "--deadline", str(START_DEADLINE_S))

        def ready() -> bool:
            workers = self.state()["workers"]
            return all(
                sum(w["role"] == role and w["state"] == "ready" for w in workers) == size
                for role, size in sizes.items()
            )

        wait_for(ready, deadline_s=START_DEADLINE_S, what=" ".join(wanted), interval_s=0.2)

    def wait_idle(self, deadline_s: float = 60.0) -> None:
        """Waits until no worker holds a request, a lease or a pull."""

        def idle() -> bool:
            loads = [worker["load"] for worker in self.state()["workers"]]
            return not any(load[name] for load in loads for name in _HELD)

        wait_for(idle, deadline_s=deadline_s, what="idle workers", interval_s=0.2)

    def pin(self, worker_id: str, cores: Sequence[int]) -> None:
        """Lets all threads of a worker and of its engine run on these cores alone.

        `tandem up` gives each engine one core, whatever its number of threads.
        """
        worker = psutil.Process(self.workers()[worker_id]["pid"])
        for process in (worker, *worker.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)

    def processes(self) -> list[psutil.Process]:
        """Returns the launcher and all processes of the cluster, Redis and Ray among them."""
        pids = {*cluster_processes(self.state()["cluster_id"]), self.process.pid}
        return [psutil.Process(pid) for pid in sorted(pids)]

    def config(self) -> ClusterConfig:
        """Returns what the cluster's own processes have, for programs that read its Redis."""
        pid = self.state()["workers"][0]["pid"]
        found = psutil.Process(pid).environ()
        names = ("TANDEM_CLUSTER_ID", "TANDEM_REDIS_URL", "TANDEM_CLUSTER_TOKEN")
        return ClusterConfig(*(found[name] for name in names))


@contextmanager
def up(
    *options: str,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "tandem.ops.cli"),
    scheme: str = "http",
) -> Iterator[Cluster]:
    """Runs `tandem up` with these options on free ports, and yields the cluster once it is ready.

    The cluster ends with the block, and with this process. If the block fails, the end of the
    launcher's screen is printed.
    """
    ports = [free_port() for _ in _PORTS]
    command = [sys.executable, *program, "up", "--die-with-parent", str(os.getpid()), *options]
    command += [
        word for name, port in zip(_PORTS, ports, strict=True) for word in (name, str(port))
    ]
    with tempfile.TemporaryDirectory() as name:
        screen = Path(name) / "up.log"
        began = time.perf_counter()
        with screen.open("wb") as output:
            variables = {**os.environ, **(environment or {})}
            # In a session of its own, a Ctrl-C ends this program, which then ends the cluster.
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=variables,
                cwd=ROOT,
                start_new_session=True,
            )
        http, grpc, admin, _ = (f"127.0.0.1:{port}" for port in ports)
        cluster = Cluster(f"{scheme}://{http}", f"http://{admin}", grpc, process, Path(name))

        def is_up() -> bool:
            if process.poll() is not None:
                raise RuntimeError("`tandem up` ended")
            return "Ctrl-C stops" in screen.read_text()

        try:
            wait_for(is_up, deadline_s=START_DEADLINE_S, what="the cluster")
            cluster.start_s = time.perf_counter() - began
            yield cluster
        except BaseException:
            print(screen.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
