"""A real cluster whose processes are kept running by the pool controller, as with `tandem up`.

It has Redis, Ray's head with the pool controller, and the router and workers that it starts. The
test owns the head, and may kill it and start a new one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from tandem.cluster.launch.certificates import write_certificates
from tandem.cluster.launch.options import LaunchOptions, certificate_folder, make_spec
from tandem.cluster.operate import differences
from tandem.cluster.pools import PoolCommand
from tandem.cluster.processes import guardian
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.ray.head_process import HeadProcess
from tandem.common.config.admin import AdminOptions
from tandem.common.config.cluster import (
    CLUSTER_ID_VARIABLE,
    REDIS_URL_VARIABLE,
    ROUTER_POOLS,
    TOKEN_VARIABLE,
)
from tandem.models.source import resolve
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tests.harness import placing
from tests.harness.certificates import worker_channel
from tests.harness.cluster import free_port, process_named, wait_for
from tests.harness.network import Network, Place

START_DEADLINE_S = 300.0
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class KeptWorker:
    """A worker as last reported by the router."""

    worker_id: str
    role: str
    pid: int
    address: str
    token: str
    cluster_id: str
    tls_dir: Path

    def state(self) -> pb.GetStateResponse:
        """The worker's state. The engine also runs check_integrity()."""
        with worker_channel(self.address, self.cluster_id, self.tls_dir) as channel:
            metadata = token_metadata(self.token)
            return WorkerStub(channel).GetState(pb.GetStateRequest(), timeout=30, metadata=metadata)


class KeptCluster:
    """A kept cluster; `close` ends all processes. Options are the workers' own."""

    def __init__(
        self,
        run_folder: Path,
        *options: str,
        model: str = "smollm2",
        prefill: int = 1,
        decode: int = 1,
        module: str = "",
        network: Network | None = None,
    ) -> None:
        """Prepares the cluster. `run_folder` must have a short path, because Ray's sockets are in
        it.

        `module` replaces tandem.worker. With a `network`, the workers with number 1 run on its
        hosts, one host for each pool; all others run at its home.
        """
        self.http_port, self.grpc_port = free_port(), free_port()
        admin = AdminOptions(port=free_port(), grpc_port=free_port())
        self.admin_url = f"http://127.0.0.1:{admin.port}"
        self.token = uuid.uuid4().hex
        home = network.home.address if network else "127.0.0.1"
        self.redis = EmbeddedRedis(run_folder / "redis", host=home)
        self.redis.start()
        self.cluster_id = f"test-{uuid.uuid4().hex[:12]}"
        write_certificates(run_folder, self.cluster_id)
        self._tls_dir = certificate_folder(run_folder, "router")
        wanted = LaunchOptions(
            num_prefill=prefill,
            num_decode=decode,
            http_port=self.http_port,
            grpc_port=self.grpc_port,
            admin=admin,
        )
        spec = make_spec(
            wanted, cluster_id=self.cluster_id, run_folder=run_folder, model=resolve(model).path
        )
        # On a machine that starts workers slowly, no request may be refused for lack of workers.
        more = dict.fromkeys(ROUTER_POOLS, ("--hold-deadline", str(START_DEADLINE_S)))
        of_workers = ("--numerics", "invariant", *options)
        pools = {
            name: msgspec.structs.replace(p, command=[*p.command, *more.get(name, of_workers)])
            for name, p in spec.pools.items()
        }
        # Of the gRPC replica the system would choose these ports, and no test would know them.
        ports = {**pools["grpc"].ports, "http_port": free_port(), "admin_port": free_port()}
        pools["grpc"] = msgspec.structs.replace(pools["grpc"], ports=ports)
        self.ready_urls = [f"{self.url}/ready", f"http://127.0.0.1:{ports['http_port']}/ready"]
        self.admin_urls = [self.admin_url, f"http://127.0.0.1:{ports['admin_port']}"]
        spec = msgspec.structs.replace(spec, pools=pools)
        if module:
            pools = {name: _running(module, pool) for name, pool in spec.pools.items()}
            spec = msgspec.structs.replace(spec, pools=pools)
        self.sizes = {"prefill": prefill, "decode": decode}  # sizes at the start
        self.network = network
        self.places: dict[str, Place] = {}
        if network is not None:
            self.places = dict(zip(("prefill-1", "decode-1"), network.hosts, strict=True))
            placed = [
                sys.executable,
                "-m",
                placing.__name__,
                placing.format_places(network, self.places),
            ]
            pools = {
                name: pool
                if name in ROUTER_POOLS
                else msgspec.structs.replace(pool, command=[*placed, *pool.command])
                for name, pool in spec.pools.items()
            }
            spec = msgspec.structs.replace(spec, pools=pools)
        self._spec = spec
        self.folder = run_folder / "logs"
        self.head = HeadProcess(
            run_folder,
            {
                **os.environ,
                CLUSTER_ID_VARIABLE: self.cluster_id,
                REDIS_URL_VARIABLE: self.redis.url,
                TOKEN_VARIABLE: self.token,
                "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
                "OMP_NUM_THREADS": "1",
            },
        )
        self._ray_pids: dict[str, int] = {}

    @property
    def logs(self) -> list[Path]:
        """The logs of routers, workers, Ray's head and the pool controller."""
        return [*self.folder.glob("*.log"), *self.folder.parent.glob("ray_head.log")]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> KeptCluster:
        try:
            self.start_head()
            wait_for(self.is_whole, deadline_s=START_DEADLINE_S, what="the whole cluster")
        except BaseException:
            self.close()
            raise
        return self

    def start_head(self) -> None:
        """Starts a new head. The cluster must have none."""
        self.head.start(self._spec)
        started = self.head.started(START_DEADLINE_S)
        assert started is not None, "Ray's head did not come up"
        self._ray_pids = started.pids

    def kill_head(self) -> None:
        """Kills GCS, raylet and the process that restarts the controller with SIGKILL. The
        controller ends with the last one."""
        for pid in self._ray_pids.values():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.head.end()
        guardian.end_cluster(self.cluster_id, 1.0)
        self.redis.stop()

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.admin_url}/v1/cluster", timeout=10).json()

    def records(self) -> dict[str, dict[str, Any]]:
        """Records of the workers that the router knows, by id."""
        return {w["worker_id"]: w for w in self.state()["workers"]}

    @property
    def workers(self) -> dict[str, KeptWorker]:
        """The ready workers, by id."""
        return {
            worker_id: KeptWorker(
                worker_id,
                r["role"],
                r["pid"],
                r["address"],
                self.token,
                self.cluster_id,
                self._tls_dir,
            )
            for worker_id, r in self.records().items()
            if r["state"] == "ready" and (r["connected"] or r["role"] == "prefill")
        }

    def is_ready(self, worker: KeptWorker) -> bool:
        """Says whether the router sees this process as ready."""
        now = self.workers.get(worker.worker_id)
        return now is not None and now.pid == worker.pid

    def is_whole(self) -> bool:
        """Says whether the pools have their wanted sizes and the router uses all workers."""
        try:
            pools = self.state()["pools"]
            sizes = {name: pool["wanted"] for name, pool in pools.items() if "wanted" in pool}
            num_workers = sum(size for name, size in sizes.items() if name != "router")
            return (
                sizes.keys() == self._spec.pools.keys() - {"grpc"}
                and not differences(pools, sizes)
                and len(self.workers) == num_workers
            )
        except (httpx.TransportError, json.JSONDecodeError):
            return False

    def scale(self, **sizes: int) -> None:
        """Requests these sizes; poll `is_whole` for completion."""
        httpx.post(f"{self.admin_url}/v1/cluster", json=sizes, timeout=10).raise_for_status()

    def pid(self, name: str) -> int:
        """Finds the first process of the cluster with this text in its command line."""
        return process_named(self.cluster_id, name)

    def pids(self, pool: str) -> dict[str, int]:
        """The pids of a pool's processes, as reported by the controller."""
        return {a["id"]: a["pid"] for a in self.state()["pools"][pool]["agents"]}

    def processes(self) -> Counter[str]:
        """Counts the running processes of each worker id."""
        found: Counter[str] = Counter()
        for pid in guardian.cluster_processes(self.cluster_id):
            try:
                command = psutil.Process(pid).cmdline()
            except psutil.NoSuchProcess:
                continue
            if "--worker-id" in command and "--role" in command:
                found[command[command.index("--worker-id") + 1]] += 1
        return found

    def starts(self) -> Counter[str]:
        """Counts how often each process was started again."""
        pools = self.state()["pools"].values()
        return Counter({a["id"]: a["starts"] for pool in pools for a in pool.get("agents", ())})


def _running(module: str, pool: PoolCommand) -> PoolCommand:
    """Copies a pool's command. If it runs workers, they use this module."""
    if "tandem.worker" not in pool.command:
        return pool
    at = pool.command.index("tandem.worker")
    command = [*pool.command[:at], module, "worker", *pool.command[at + 1 :]]
    return msgspec.structs.replace(pool, command=command)
