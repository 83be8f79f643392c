"""The pool controller on a real Ray head, with small stand-ins for the processes.

The tests talk to the controller as a router does, through Redis, and to the rest with signals.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from redis import Redis

from tandem.cluster.pools import ClusterSpec, PoolCommand
from tandem.cluster.processes import guardian, owned, process
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.cluster.ray.head_process import HeadProcess
from tandem.cluster.ray.node import HeadStarted
from tandem.common.config.cluster import CLUSTER_ID_VARIABLE, REDIS_URL_VARIABLE
from tests.harness.cluster import CONTROLLER
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.service

OBEDIENT = "import signal; signal.pause()"
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); [signal.pause() for _ in 'ab']"
)
ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class RealCluster:
    spec: ClusterSpec
    redis: Redis
    head: HeadProcess
    started: HeadStarted = field(init=False)

    def start_ray(self) -> None:
        """A fresh head; what is left of the one before is ended."""
        self.head.start(self.spec)
        started = self.head.started(60)
        assert started is not None
        self.started = started

    def pools(self) -> dict[str, Any]:
        value = self.redis.get(f"{{tandem:{self.spec.cluster_id}}}:pools")
        return json.loads(value) if isinstance(value, bytes) else {}

    def scale(self, **sizes: object) -> None:
        self.redis.lpush(f"{{tandem:{self.spec.cluster_id}}}:scale", json.dumps(sizes))

    def running(self, pool: str) -> dict[str, int]:
        """Process id -> pid of what the controller says is running."""
        agents = self.pools().get(pool, {}).get("agents", [])
        return {a["id"]: a["pid"] for a in agents if a["state"] == "running"}

    def has(self, pool: str, size: int) -> bool:
        agents = self.pools().get(pool, {}).get("agents", [])
        return len(agents) == size == len(self.running(pool))

    def stand_ins(self, process_id: str) -> list[int]:
        """Pids of all processes that were started under this id."""
        return [
            pid
            for pid in guardian.cluster_processes(self.spec.cluster_id)
            if psutil.Process(pid).cmdline()[-1:] == [process_id]
        ]

    def controllers(self) -> set[int]:
        """Pids of the pool controller; empty if it does not run."""
        found = set()
        for pid in guardian.cluster_processes(self.spec.cluster_id):
            with suppress(psutil.NoSuchProcess):
                if CONTROLLER in psutil.Process(pid).cmdline():
                    found.add(pid)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    cluster_id = f"test-{uuid.uuid4().hex[:12]}"
    run_folder = tmp_path_factory.mktemp("run")
    stand_in = [sys.executable, "-S", "-c", OBEDIENT, "{id}"]
    spec = ClusterSpec(
        cluster_id=cluster_id,
        run_folder=str(run_folder),
        pools={
            "router": PoolCommand(stand_in),
            "prefill": PoolCommand(stand_in, num_cores=1),
            "decode": PoolCommand([sys.executable, "-S", "-c", DEAF, "{id}"], num_cores=1),
        },
        wanted={"router": 1, "prefill": 1, "decode": 1},
        cores=[0, 1],
        drain_deadline_s=1.0,
    )
    with EmbeddedRedis() as server, Redis.from_url(server.url) as redis:
        environment = {
            **os.environ,
            CLUSTER_ID_VARIABLE: cluster_id,
            REDIS_URL_VARIABLE: server.url,
            "PYTHONPATH": str(ROOT),
        }
        made = RealCluster(spec, redis, HeadProcess(run_folder, environment))
        # One process runs before Ray does, as the launcher starts them: it has to be adopted.
        early = process.start("prefill-0", stand_in, run_folder, environment)
        try:
            made.start_ray()
            wait_until(lambda: all(made.has(p, 1) for p in ("router", "prefill", "decode")))
            assert made.running("prefill") == {"prefill-0": early.pid}
            yield made
        finally:
            early.close()
            made.head.end()
            assert guardian.end_cluster(cluster_id, 0.1)


def test_processes_run_apart_from_ray(cluster: RealCluster) -> None:
    for pool in ("router", "decode"):
        (pid,) = cluster.running(pool).values()
        assert os.getsid(pid) == pid
        assert psutil.Process(pid).ppid() not in guardian.cluster_processes(cluster.spec.cluster_id)
        environment = psutil.Process(pid).environ()
        assert environment[CLUSTER_ID_VARIABLE] == cluster.spec.cluster_id
        assert not [name for name in environment if name.startswith("RAY_")]
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert psutil.Process(pid).nice() == niceness, "it gives way to all other programs"


def test_ray_listens_on_this_machine_only(cluster: RealCluster) -> None:
    addresses = set()
    for pid in guardian.cluster_processes(cluster.spec.cluster_id):
        for connection in psutil.Process(pid).net_connections():
            if connection.status == psutil.CONN_LISTEN:
                addresses.add(connection.laddr.ip.removeprefix("::ffff:"))
    assert addresses == {"127.0.0.1"}


def test_a_crashed_process_is_started_again(cluster: RealCluster) -> None:
    before = cluster.running("prefill")["prefill-0"]
    os.kill(before, signal.SIGKILL)
    after = wait_until(lambda: cluster.running("prefill").get("prefill-0", before) != before)
    assert after
    assert cluster.has("prefill", 1)


def test_pools_grow_and_shrink_by_the_newest(cluster: RealCluster) -> None:
    oldest = cluster.running("prefill")
    cluster.scale(prefill=3)
    wait_until(lambda: cluster.has("prefill", 3))
    grown = cluster.running("prefill")
    assert set(grown) == {"prefill-0", "prefill-1", "prefill-2"}
    cores = {a["core"] for a in cluster.pools()["prefill"]["agents"]}
    assert cores == {0, 1}
    cluster.scale(prefill=1)
    wait_until(lambda: cluster.has("prefill", 1))
    assert cluster.running("prefill") == oldest
    alive = guardian.cluster_processes(cluster.spec.cluster_id)
    assert {i for i, pid in grown.items() if pid in alive} == {"prefill-0"}


def test_one_that_does_not_drain_in_time_is_killed(cluster: RealCluster) -> None:
    (deaf,) = cluster.running("decode").values()
    cluster.scale(decode=0)
    wait_until(lambda: cluster.has("decode", 0), 10)
    wait_until(lambda: deaf not in guardian.cluster_processes(cluster.spec.cluster_id))
    cluster.scale(decode=1)
    wait_until(lambda: cluster.has("decode", 1))


def test_a_request_that_makes_no_sense_changes_nothing(cluster: RealCluster) -> None:
    before = cluster.pools()
    cluster.scale(prefill="many")
    cluster.scale(workers=3)
    requests = f"{{tandem:{cluster.spec.cluster_id}}}:scale"
    wait_until(lambda: cluster.redis.llen(requests) == 0)
    assert cluster.pools() == before


def test_a_cluster_of_one_machine_has_no_ray_actor(cluster: RealCluster) -> None:
    """Each idle one would take 0.6% of a core."""
    names = [
        psutil.Process(p).cmdline()[0] for p in guardian.cluster_processes(cluster.spec.cluster_id)
    ]
    # these two are processes of Ray's node, not actors
    own = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    assert not [name for name in names if name.startswith("ray::") and not name.startswith(own)]


def test_a_killed_controller_comes_back_and_adopts_what_runs(cluster: RealCluster) -> None:
    before = {p: cluster.running(p) for p in ("router", "prefill", "decode")}
    (controller,) = cluster.controllers()
    os.kill(controller, signal.SIGKILL)
    (router,) = before["router"].values()
    assert psutil.pid_exists(router)
    # The new controller watches the old process: when that dies, there is a next one.
    os.kill(router, signal.SIGKILL)
    wait_until(lambda: cluster.running("router").get("router-0", router) != router)
    assert {p: cluster.running(p) for p in ("prefill", "decode")} == {
        p: before[p] for p in ("prefill", "decode")
    }
    assert cluster.stand_ins("router-0") == list(cluster.running("router").values())


def test_a_killed_controller_remembers_the_sizes(cluster: RealCluster) -> None:
    cluster.scale(prefill=2)
    wait_until(lambda: cluster.has("prefill", 2))
    running = cluster.running("prefill")
    (controller,) = cluster.controllers()
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: cluster.controllers() - {controller})
    cluster.scale(router=2)
    wait_until(lambda: cluster.has("router", 2))
    assert cluster.running("prefill") == running
    cluster.scale(router=1, prefill=1)
    wait_until(lambda: cluster.has("router", 1) and cluster.has("prefill", 1))


def test_processes_outlive_ray_and_are_adopted_by_the_next(cluster: RealCluster) -> None:
    before = {p: cluster.running(p) for p in ("router", "prefill", "decode")}
    cluster.head.end()
    wait_until(lambda: not cluster.controllers())
    alive = guardian.cluster_processes(cluster.spec.cluster_id)
    assert all(pid in alive for pool in before.values() for pid in pool.values())
    cluster.redis.delete(f"{{tandem:{cluster.spec.cluster_id}}}:pools")
    for size in (6, 0, 1):  # nobody follows; in the end only the last one counts
        cluster.scale(prefill=size)
    cluster.start_ray()
    wait_until(lambda: all(cluster.has(p, 1) for p in before))
    assert {p: cluster.running(p) for p in before} == before
    records = Path(cluster.spec.run_folder) / "processes"
    assert not (records / "prefill-5.json").exists()


def test_one_that_drained_when_ray_ended_is_not_started_by_the_next(cluster: RealCluster) -> None:
    cluster.scale(prefill=2)
    wait_until(lambda: cluster.has("prefill", 2))
    stays, leaves = (cluster.running("prefill")[f"prefill-{n}"] for n in (0, 1))
    cluster.head.end()
    wait_until(lambda: not cluster.controllers())
    run_folder = Path(cluster.spec.run_folder)
    known = owned.read(run_folder)
    assert known is not None
    known.wanted["prefill"] = 1
    known.members = [
        msgspec.structs.replace(m, state="draining" if m.member_id == "prefill-1" else m.state)
        for m in known.members
    ]
    known.write(run_folder)
    os.kill(leaves, signal.SIGTERM)  # by the agent, just before its end
    wait_until(lambda: leaves not in guardian.cluster_processes(cluster.spec.cluster_id))
    cluster.redis.delete(f"{{tandem:{cluster.spec.cluster_id}}}:pools")
    cluster.start_ray()
    wait_until(lambda: cluster.has("prefill", 1))
    assert cluster.running("prefill") == {"prefill-0": stays}
    record = json.loads((run_folder / "processes" / "prefill-1.json").read_text())
    assert record["pid"] == leaves, "it was started again"


@pytest.mark.parametrize("name", ["gcs_server", "head process"])
def test_what_a_killed_process_leaves_of_ray_is_gone_before_the_next(
    cluster: RealCluster, name: str
) -> None:
    """Its controller would live on, and start what the next one starts, too."""
    cluster.scale(prefill=1)
    wait_until(lambda: cluster.has("prefill", 1))
    before = cluster.running("prefill")
    left = cluster.controllers()
    os.kill(cluster.started.pids[name], signal.SIGKILL)
    cluster.start_ray()
    assert not left & cluster.controllers()
    assert cluster.running("prefill") == before
    os.kill(before["prefill-0"], signal.SIGKILL)
    wait_until(lambda: cluster.running("prefill").get("prefill-0", 0) not in (0, *before.values()))
    cluster.scale(prefill=0)
    wait_until(lambda: cluster.has("prefill", 0))
    assert not cluster.stand_ins("prefill-0"), "somebody started it again"
