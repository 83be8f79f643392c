"""The pool controller on a Ray cluster with an autoscaler: nodes come for workers, and go again.

`ray.cluster_utils.AutoscalingCluster` takes the place of KubeRay: Ray's own autoscaler starts and
ends raylets on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.operate import call_router
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import (
    CLUSTER_ID_VARIABLE,
    REDIS_URL_OF_KIND,
    REDIS_URL_VARIABLE,
    RUN_FOLDER_VARIABLE,
    TOKEN_VARIABLE,
)
from tests.harness.autoscaling_ray import AutoscalingRay
from tests.harness.cluster import LocalCluster, wait_for
from tests.tiny_models import make_random_speaker

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_S = 120.0
IDLE_TIMEOUT_S = 6.0
MAX_TOKENS = 48


@dataclass
class Autoscaled:
    """A router on this machine, and workers on the nodes of an autoscaled Ray cluster."""

    cluster: LocalCluster
    ray: AutoscalingRay
    controller: subprocess.Popen[bytes]
    model: str = ""

    def scale(self, **sizes: int) -> None:
        call_router(self.cluster.admin_url, "POST", sizes)

    def pool(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = call_router(self.cluster.admin_url, "GET")["pools"][name]
        return found

    def is_whole(self, name: str, size: int) -> bool:
        pool = self.pool(name)
        agents = len(pool.get("agents", ()))
        return agents == pool["ready"] == pool["registered"] == size

    def wait_whole(self, name: str, size: int) -> None:
        try:
            wait_for(
                lambda: self.is_whole(name, size),
                deadline_s=START_S,
                what=f"{name}={size}",
                interval_s=0.2,
            )
        except TimeoutError as error:
            error.add_note(json.dumps(self.pool(name), indent=1))
            error.add_note(self.ray.monitor_log())
            raise

    def complete(self, number: int) -> tuple[str, str]:
        """Returns the answer of a greedy completion and the decode worker that gave it."""
        body = {"prompt": f"Count from {number}: the", "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"model": self.model, "ignore_eos": True}
        reply = httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        record = call_router(self.cluster.url, "GET", path=f"/v1/requests/{answer['id']}")
        return answer["choices"][0]["text"], record["decode_worker"]


@dataclass
class Load:
    """Clients that ask all the time between `with` and its end."""

    autoscaled: Autoscaled
    num_clients: int
    answers: list[tuple[int, str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for number in range(self.num_clients):
            self._threads.append(threading.Thread(target=self._ask, args=(number,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        while not self._ended.is_set():
            try:
                self.answers.append((number, *self.autoscaled.complete(number)))
            except (AssertionError, httpx.HTTPError, OSError) as error:
                self.faults.append(repr(error))


@pytest.fixture(scope="module")
def autoscaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autoscaled]:
    folder = tmp_path_factory.mktemp("nodes")
    model = make_random_speaker(folder / "tiny").path
    cluster_id = f"nodes-{folder.parent.name}"
    with EmbeddedRedis(folder / "redis", cluster_id=cluster_id) as redis:
        cluster = LocalCluster(redis, folder, model=str(model), cluster_id=cluster_id)
        environment = {
            CLUSTER_ID_VARIABLE: cluster_id,
            TOKEN_VARIABLE: cluster.token,
            REDIS_URL_VARIABLE: redis.url_of("controller"),
            f"{REDIS_URL_OF_KIND}worker": redis.url_of("worker"),
            RUN_FOLDER_VARIABLE: str(folder / "run"),
            "SPEAKER": str(model),
        }
        seats = {pool: {"resources": {pool: 1}, "max_workers": 3} for pool in ("prefill", "decode")}
        head = {"prefill": 1.0, "decode": 1.0}
        ray = AutoscalingRay(environment, head, seats, idle_timeout_s=IDLE_TIMEOUT_S)
        pools = folder / "pools.json"
        pools.write_text(json.dumps({role: {"command": command(role)} for role in seats}))
        cluster.start_router()
        ray.start()
        controller = start_controller(ray, pools)
        made = Autoscaled(cluster, ray, controller)
        try:
            wait_for(lambda: cluster.records(), deadline_s=START_S, what="a worker")
            made.wait_whole("prefill", 1)
            made.wait_whole("decode", 1)
            served = httpx.get(f"{cluster.url}/v1/models", timeout=10).json()
            made.model = served["data"][0]["id"]
            yield made
        finally:
            controller.terminate()
            controller.wait(30)
            ray.shutdown()
            cluster.close()


def command(role: str) -> list[str]:
    """The command of a pool's workers; each node knows the model by a variable."""
    own = [sys.executable, "-m", "tandem.worker", "--role", role, "--worker-id", "{id}"]
    own += ["--model", "$(SPEAKER)", "--numerics", "invariant", "--num-blocks", "400"]
    return own


def start_controller(ray: AutoscalingRay, pools: Path) -> subprocess.Popen[bytes]:
    own = [sys.executable, "-m", "tandem.ops.cli", "controller", "--pools", str(pools)]
    own += ["--ray-address", ray.address, "--request-nodes"]
    with pools.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(own, env={**os.environ, **ray.environment}, stdout=log, stderr=log)


def test_nodes_come_for_workers_and_go_with_them(autoscaled: Autoscaled) -> None:
    assert autoscaled.ray.num_nodes == 1
    expected = {number: autoscaled.complete(number)[0] for number in range(4)}

    autoscaled.scale(decode=3, prefill=2)
    autoscaled.wait_whole("decode", 3)
    autoscaled.wait_whole("prefill", 2)
    assert autoscaled.ray.num_nodes == 4
    agents = autoscaled.pool("decode")["agents"] + autoscaled.pool("prefill")["agents"]
    assert len({agent["host"] for agent in agents}) == 4

    with Load(autoscaled, 4) as load:
        workers = {agent["id"] for agent in autoscaled.pool("decode")["agents"]}
        wait_for(
            lambda: workers <= {worker for *_, worker in load.answers},
            deadline_s=60,
            what="an answer of each worker",
        )
        autoscaled.scale(decode=1, prefill=1)
        autoscaled.wait_whole("decode", 1)
        autoscaled.wait_whole("prefill", 1)
        drained_at = time.monotonic()
        wait_for(
            lambda: autoscaled.ray.num_nodes == 1,
            deadline_s=IDLE_TIMEOUT_S + 60,
            what="the end of idle nodes",
            interval_s=0.2,
        )
        gone_s = time.monotonic() - drained_at
    assert load.faults == []
    assert {(number, text) for number, text, _ in load.answers} <= set(expected.items())
    print(f"{len(load.answers)} answers; nodes went {gone_s:.0f} s after their workers")
