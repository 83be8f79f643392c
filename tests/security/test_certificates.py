"""Certificates and roots of a real cluster are replaced twice while it serves requests."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from contextlib import closing

import grpc
import httpx
import pytest

from tandem.cluster.launch.certificates import Authority
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.tls import Kind
from tandem.net.rpc.auth import token_metadata
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.worker_pb2_grpc import WorkerStub
from tandem.net.store.client import connect_blocking
from tests.harness.certificates import worker_channel
from tests.harness.client import complete, metric, open_client
from tests.harness.cluster import LocalCluster
from tests.harness.waiting import eventually

pytestmark = pytest.mark.e2e

KINDS: tuple[Kind, ...] = ("router", "worker")
CLIENTS = 2
ANSWERS_BETWEEN = 3  # minimum number of requests between two steps


class Rotating:
    """A cluster of one prefill and one decode worker, and the authority of its certificates."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.authority = Authority(cluster.cluster_id)
        self.write(self.authority, self.authority.pem)

    def write(self, authority: Authority, roots: bytes) -> None:
        """Writes new certificates of this authority for all processes."""
        assert self.cluster.tls_dir is not None
        for kind in KINDS:
            authority.write(self.cluster.tls_dir / kind, kind, roots=roots)

    def status(self, worker_id: str, authority: Authority) -> str:
        """The gRPC status that a router with a certificate of this authority gets on a new
        connection."""
        worker = self.cluster.workers[worker_id]
        folder = self.cluster.folder / "another"
        authority.write(folder, "router", roots=self.authority.pem)
        with worker_channel(worker.address, self.cluster.cluster_id, folder) as channel:
            try:
                request = pb.GetStateRequest()
                metadata = token_metadata(worker.token)
                WorkerStub(channel).GetState(request, timeout=10, metadata=metadata)
                return "OK"
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def rotating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rotating]:
    """The prefill worker computes every prompt, and blocks are pulled by gRPC. Redis has a user for
    each kind of process."""
    folder = tmp_path_factory.mktemp("cluster")
    cluster_id = f"test-{uuid.uuid4().hex[:8]}"
    redis = EmbeddedRedis(cluster_id=cluster_id)
    cluster = LocalCluster(redis, folder, tls_dir=folder / "tls", cluster_id=cluster_id)
    cluster.options = ["--num-blocks", "400", "--transport", "grpc", "--prefill-at", "remote"]
    rotating = Rotating(cluster)
    try:
        redis.start()
        cluster.start(prefill=1, decode=1)
        yield rotating
    finally:
        cluster.close()
        redis.stop()


async def test_two_rotations_under_load_fail_no_request(rotating: Rotating) -> None:
    rng = random.Random(1)
    num_answered = 0
    done = asyncio.Event()
    cluster = rotating.cluster

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal num_answered
        while not done.is_set():
            # a new prompt, whose blocks are in no cache
            prompt = [rng.randrange(1000, 20_000) for _ in range(96)]
            answer = await complete(client, prompt, max_tokens=4)
            assert len(answer.token_ids) == 4
            num_answered += 1

    async def some_answers() -> None:
        # a failing client ends the task group and this task
        enough = num_answered + ANSWERS_BETWEEN
        await eventually(lambda: num_answered >= enough, deadline_s=60)

    async def rotate() -> None:
        old = rotating.authority
        new = Authority(cluster.cluster_id)
        both = old.pem + new.pem
        for signer, roots in ((old, both), (new, both), (new, new.pem)):
            rotating.write(signer, roots)
            await some_answers()
        rotating.authority = new

    first = rotating.authority
    async with open_client(cluster) as client, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask(client))
        await some_answers()
        await rotate()
        await rotate()
        done.set()
    # Every prompt was pulled at the first attempt, so no failure was hidden by a fallback.
    assert metric(cluster, "decode-0", "tandem_local_prefills_total") == 0
    again = {"choice": "remote", "turn": "again"}
    assert metric(cluster, "decode-0", "tandem_prefill_choices_total", **again) == 0
    pulled = metric(cluster, "decode-0", "tandem_kv_blocks_pulled_total", transport="grpc")
    assert pulled >= num_answered * 6
    for worker_id in cluster.workers:
        assert rotating.status(worker_id, rotating.authority) == "OK"
        assert rotating.status(worker_id, first) == "UNAVAILABLE"


async def test_a_router_that_comes_later_takes_the_current_certificate(rotating: Rotating) -> None:
    with rotating.cluster.another_router() as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            answer = await complete(client, list(range(1000, 1100)), max_tokens=4)
    assert len(answer.token_ids) == 4


async def test_redis_refused_nothing_that_a_process_needs(rotating: Rotating) -> None:
    with closing(connect_blocking(rotating.cluster.redis.url)) as redis:
        refused = redis.execute_command("ACL", "LOG")
    assert refused == []
