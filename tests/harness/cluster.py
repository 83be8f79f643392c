"""A real cluster for tests, without Ray: Redis, workers and a router as processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx
import psutil

from tandem.cluster.processes import guardian
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import REDIS_URL_VARIABLE
from tandem.net.observability.logs import STACKS_SIGNAL
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tests.harness.certificates import worker_channel
from tests.harness.network import Place

# Each process imports torch for some seconds, and five clusters with ranks may start on two cores.
START_DEADLINE_S = 240.0


def wait_for(
    probe: Callable[[], Any], *, deadline_s: float, what: str, interval_s: float = 0.02
) -> Any:
    """Polls until `probe` returns something true, and returns it. Raises TimeoutError that names
    `what`."""
    deadline = time.monotonic() + deadline_s
    while True:
        if found := probe():
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {deadline_s} s")
        time.sleep(interval_s)


_reserved: deque[socket.socket] = deque()
_RESERVED_MAX = 64


def free_port() -> int:
    """Finds a free port that no other test process gets for half a minute.

    It is outside the range of ephemeral ports, because one of those may be taken before a server
    binds it, and outside Ray's range for its workers (10,002 to 19,999), where a head refuses its
    own ports. A Unix socket named after the port reserves it among concurrent test processes, until
    this process ends.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0tandem-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        _reserved.append(mark)
        if len(_reserved) > _RESERVED_MAX:
            _reserved.popleft().close()
        return port


# text in the command line of the pool controller's process
CONTROLLER = "tandem.cluster.ray.controller"


def process_named(cluster_id: str, name: str) -> int:
    """Finds the first process of a cluster with this text in its command line. Raises LookupError
    if there is none."""
    for pid in guardian.cluster_processes(cluster_id):
        try:
            if name in " ".join(psutil.Process(pid).cmdline()):
                return pid
        except psutil.NoSuchProcess:
            continue
    raise LookupError(name)


class Served(Protocol):
    """A running cluster, as seen by its clients."""

    @property
    def url(self) -> str: ...

    @property
    def admin_url(self) -> str: ...

    @property
    def admin_urls(self) -> list[str]:
        """The admin addresses of all processes that answer requests."""

    grpc_port: int

    def records(self) -> dict[str, dict[str, Any]]:
        """Records of the workers that the router knows, by id."""


@dataclass
class WorkerProcess:
    """A worker process, and calls of its private service."""

    worker_id: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    token: str
    cluster_id: str = ""
    router_tls: Path | None = None  # a router's certificate, if calls are encrypted
    address: str = ""
    channel: grpc.Channel | None = None

    def stub(self) -> WorkerStub:
        if self.channel is None:
            assert self.address, f"{self.worker_id} was not seen ready"
            self.channel = worker_channel(self.address, self.cluster_id, self.router_tls)
        return WorkerStub(self.channel)

    def state(self) -> pb.GetStateResponse:
        """The worker's state. The engine also runs check_integrity()."""
        return self.stub().GetState(
            pb.GetStateRequest(), timeout=30, metadata=token_metadata(self.token)
        )

    def kill(self) -> None:
        """Kills the worker with SIGKILL, which also ends its engine."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.wait_ended()

    def wait_ended(self) -> None:
        """Waits until the worker has exited after a stop; kills it after a limit."""
        if self.channel is not None:
            self.channel.close()
        _wait_or_kill(self.process, 5)


def _wait_or_kill(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class LocalCluster:
    """Starts Redis, routers and workers as requested; `close` stops all of them. Options are the
    workers' own."""

    redis: EmbeddedRedis
    folder: Path
    model: str = "smollm2"
    options: Sequence[str] = ("--numerics", "invariant", "--num-blocks", "400")
    # Tests rely on the tree's results, so a delay of the machine must not skip a lookup.
    router_options: Sequence[str] = ("--lookup-deadline", "0.5")
    # added to the environment of all processes
    environment: dict[str, str] = field(default_factory=dict)
    tls_dir: Path | None = None  # has the folders `router` and `worker` with certificates
    cluster_id: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    router: subprocess.Popen[bytes] | None = None
    http_port: int = 0
    grpc_port: int = 0
    admin_port: int = 0

    @property
    def logs(self) -> list[Path]:
        return list(self.folder.glob("*.log"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def admin_urls(self) -> list[str]:
        """The admin addresses of all processes that answer requests: here one router."""
        return [self.admin_url]

    def start(self, *, prefill: int, decode: int) -> LocalCluster:
        """Starts workers and the router, and waits until all are ready."""
        self.start_router()
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                self.start_worker(f"{role}-{number}", role)
        self.wait_ready()
        return self

    def start_worker(
        self,
        worker_id: str,
        role: str,
        *more: str,
        environment: dict[str, str] | None = None,
        at: Place | None = None,
        module: Sequence[str] = ("tandem.worker",),
    ) -> WorkerProcess:
        """Starts a worker. `at` is the place in a `Network` where it runs; Redis must be reachable
        from it.

        `module` is the module to run, followed by its first arguments.
        """
        log = self.folder / f"{worker_id}.log"
        command = [sys.executable, "-m", *module, "--role", role]
        if at is not None:
            command = [*at.prefix, *command, "--host", at.address]
            environment = {**at.environment, **(environment or {})}
        environment = {REDIS_URL_VARIABLE: self.redis.url_of("worker"), **(environment or {})}
        command += ["--model", self.model, "--worker-id", worker_id, *self.options, *more]
        command += self._tls("worker")
        worker = WorkerProcess(
            worker_id,
            role,
            self._spawn(command, log, environment),
            log,
            self.token,
            self.cluster_id,
            self.tls_dir and self.tls_dir / "router",
        )
        self.workers[worker_id] = worker
        return worker

    def start_router(self) -> None:
        self.http_port, self.grpc_port, self.admin_port = free_port(), free_port(), free_port()
        admin = ("--admin-port", str(self.admin_port))
        self.router = self.spawn_router(self.http_port, self.grpc_port, *admin)

    @contextmanager
    def another_router(self, *options: str) -> Iterator[str]:
        """Runs an additional router with its own options. Yields its URL once it is ready."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        router = self.spawn_router(port, free_port(), *options)

        def ready() -> bool:
            assert router.poll() is None, "the router ended; see its log"
            try:
                return httpx.get(f"{url}/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(ready, deadline_s=START_DEADLINE_S, what="readiness of another router")
            yield url
        finally:
            router.terminate()
            router.wait(10)

    def spawn_router(
        self, http_port: int, grpc_port: int, *options: str
    ) -> subprocess.Popen[bytes]:
        """Starts a router on these ports. Its admin ports are chosen by the system."""
        command = [sys.executable, "-m", "tandem.router", "--model", self.model]
        command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        command += ["--admin-port", "0", "--admin-grpc-port", "0"]
        command += [*self.router_options, *options, *self._tls("router")]
        own = {REDIS_URL_VARIABLE: self.redis.url_of("router")}
        return self._spawn(command, self.folder / "router.log", own)

    def wait_ready(self, *worker_ids: str) -> None:
        """Waits until the router sees these workers (default: all) as ready and their pairs as
        connected."""
        wanted = set(worker_ids or self.workers)
        sources = {w.worker_id for w in self.workers.values() if w.role == "prefill"}

        def ready() -> bool:
            for worker_id in wanted:
                if self.workers[worker_id].process.poll() is not None:
                    text = self.workers[worker_id].log.read_text()[-3000:]
                    raise RuntimeError(f"{worker_id} ended:\n{text}")
            records = self.records()
            for worker_id in wanted:
                if not self.is_ready(self.workers[worker_id], records):
                    return False
                missing = sources - set(records[worker_id]["transports"])
                if self.workers[worker_id].role == "decode" and missing:
                    return False
            return True

        # Starting workers use both cores for seconds, so this process polls less often.
        what = f"readiness of {sorted(wanted)}"
        try:
            wait_for(ready, deadline_s=START_DEADLINE_S, what=what, interval_s=0.1)
        except TimeoutError as error:
            for worker_id in sorted(wanted):
                error.add_note(f"{worker_id}:\n{self._stacks_of(self.workers[worker_id])}")
            raise

    def _stacks_of(self, worker: WorkerProcess) -> str:
        """The end of the worker's log, after its processes wrote the stacks of their threads to
        it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, STACKS_SIGNAL)
        time.sleep(1)
        return worker.log.read_text()[-8000:]

    def is_ready(
        self, worker: WorkerProcess, records: dict[str, dict[str, Any]] | None = None
    ) -> bool:
        """Says whether the router sees this process as ready, and stores its address."""
        record = (self.records() if records is None else records).get(worker.worker_id, {})
        # The record of a killed predecessor remains valid for a while.
        if worker.process.poll() is not None or record.get("pid") != worker.process.pid:
            return False
        if record["state"] != "ready":
            return False
        worker.address = record["address"]
        return True

    def records(self) -> dict[str, dict[str, Any]]:
        """Records of the workers that the router knows, by id; empty if the router does not
        answer."""
        try:
            answer = httpx.get(f"{self.admin_url}/v1/cluster", timeout=5)
        except httpx.TransportError:
            if self.router is not None and self.router.poll() is not None:
                raise RuntimeError((self.folder / "router.log").read_text()[-3000:]) from None
            return {}
        return {w["worker_id"]: w for w in answer.json()["workers"]}

    def idle(self) -> bool:
        """Says whether no worker holds sequences, leases or blocks. Raises AssertionError if a pool
        fails its integrity check."""
        for worker in self.workers.values():
            state = worker.state()
            assert state.integrity_ok, f"{worker.worker_id}: {state.integrity_message}"
            load = state.load
            held = load.num_running + load.num_waiting + load.num_leases + load.num_pulls
            if held or load.blocks_used:
                return False
        return True

    def wait_idle(self, deadline_s: float = 10.0) -> None:
        wait_for(self.idle, deadline_s=deadline_s, what="idleness of all workers")

    def close(self) -> None:
        for worker in self.workers.values():  # all drain at the same time
            worker.process.terminate()
        for worker in self.workers.values():
            worker.wait_ended()
        if self.router is not None:
            self.router.terminate()
            _wait_or_kill(self.router, 10)

    def _tls(self, kind: str) -> list[str]:
        return ["--tls-dir", str(self.tls_dir / kind)] if self.tls_dir else []

    def _spawn(
        self, command: list[str], log: Path, more: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **self.environment,
            **(more or {}),
            "TANDEM_CLUSTER_ID": self.cluster_id,
            "TANDEM_CLUSTER_TOKEN": self.token,
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
