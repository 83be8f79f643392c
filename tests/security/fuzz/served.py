"""A router and a worker with a tiny model, shared by the targets on sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tests.harness.cluster import LocalCluster, WorkerProcess, free_port
from tests.security.fuzz.file_targets import write_tiny_model

DEADLINE_S = 20.0  # time limit for an answer; a later one counts as a hang
_MAX_MODEL_LEN = 64  # limits the time for valid inputs with many tokens


class Served:
    """The running processes."""

    def __init__(self, cluster: LocalCluster, admin_grpc_port: int) -> None:
        self.url = cluster.url
        self.http_port = cluster.http_port
        self.admin_url = cluster.admin_url
        self.grpc_address = f"127.0.0.1:{cluster.grpc_port}"
        self.admin_grpc_address = f"127.0.0.1:{admin_grpc_port}"
        self.config = ClusterConfig(cluster.cluster_id, cluster.redis.url, cluster.token)
        self.worker: WorkerProcess = cluster.workers["decode-0"]
        self._cluster = cluster

    def router_bytes(self) -> int:
        """The memory of the router's processes."""
        assert self._cluster.router is not None
        return _family_bytes(self._cluster.router.pid)

    def worker_bytes(self) -> int:
        """The memory of the worker's processes."""
        return _family_bytes(self.worker.process.pid)

    async def check(self) -> None:
        """Raises AssertionError if the router is not ready, or the worker still holds something."""
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            answer = await client.get(f"{self.url}/ready")
        assert answer.status_code == 200, answer.text
        self._cluster.wait_idle(DEADLINE_S)


def _family_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(int(p.memory_info().rss) for p in [process, *process.children(recursive=True)])


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Starts the processes with their logs in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_tiny_model(folder)
    admin_grpc_port = free_port()
    with EmbeddedRedis() as redis:
        cluster = LocalCluster(
            redis,
            folder,
            str(model.path),
            options=("--num-blocks", "400", "--max-model-len", str(_MAX_MODEL_LEN)),
            router_options=("--admin-grpc-port", str(admin_grpc_port)),
        )
        try:
            cluster.start(prefill=0, decode=1)
            yield Served(cluster, admin_grpc_port)
        finally:
            cluster.close()
