"""Pool sizes and roles, over HTTP and gRPC, on a router with two scripted decode workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from tandem.net.rpc.tandem.v1 import cluster_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.worker_pb2 import SubmitSequence
from tandem.net.store.control_state import Head
from tandem.router.scaling import size_owner
from tests.harness.scripted_worker import Say, ScriptedWorker, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

BODY = {"prompt": "one two three", "max_tokens": 3}


@pytest_asyncio.fixture(loop_scope="module")
async def stub(router: RunningRouter) -> AsyncIterator[ClusterStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.admin.grpc_port}") as channel:
        yield ClusterStub(channel)
    for worker in router.workers:
        worker.role = "decode"
        worker.state = "ready"
        await worker.write_record()
    await eventually(lambda: all(w.role == "decode" for w in router.router.view.snapshots()))


def path(worker_id: str) -> str:
    return f"/v1/cluster/workers/{worker_id}/role"


async def pools(router: RunningRouter) -> dict[str, dict[str, int]]:
    return (await router.admin.get("/v1/cluster")).json()["pools"]  # type: ignore[no-any-return]


async def test_a_worker_flips_and_comes_back(router: RunningRouter, stub: ClusterStub) -> None:
    reply = await router.admin.post(path("decode-1"), json={})
    assert reply.status_code == 200, reply.text
    flipped = reply.json()
    assert (flipped["worker_id"], flipped["role"], flipped["took_s"]) == (
        "decode-1",
        "prefill",
        0.25,
    )
    assert flipped["seen_s"] < 3  # else it would have been given up
    counts = await pools(router)
    assert (counts["decode"]["ready"], counts["decode"]["serving"]) == (2, 1)
    assert (counts["prefill"]["ready"], counts["prefill"]["serving"]) == (0, 1)

    router.script(saying([1, 2, 3]))
    answer = await router.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    submit = router.workers[0].submitted[0]
    assert isinstance(submit, SubmitSequence)
    assert [c.worker_id for c in submit.prefill_candidates] == ["decode-1"]

    back = await stub.FlipWorker(pb.SetWorkerRoleRequest(worker_id="decode-1", role="decode"))
    assert (back.role, back.took_s) == ("decode", 0.25)
    await eventually(lambda: router.router.view.client("decode-1") is not None)


async def test_what_runs_on_a_worker_that_flips_goes_on(
    router: RunningRouter, stub: ClusterStub
) -> None:
    go_on = asyncio.Event()

    async def halting(submit: SubmitSequence, say: Say) -> None:
        say(update(submit, [5]))
        await go_on.wait()
        say(update(submit, [6, 7], "length"))

    router.workers[1].script = router.workers[0].script = halting
    asked = [asyncio.create_task(router.http.post("/v1/completions", json=BODY)) for _ in range(8)]
    await eventually(lambda: all(w.submitted for w in router.workers))
    await stub.SetWorkerRole(pb.SetWorkerRoleRequest(worker_id="decode-1"))
    go_on.set()

    assert [(await answer).status_code for answer in asked] == [200] * 8


async def test_the_last_decode_worker_stays(router: RunningRouter, stub: ClusterStub) -> None:
    await stub.SetWorkerRole(pb.SetWorkerRoleRequest(worker_id="decode-0"))
    reply = await router.admin.post(path("decode-1"), json={"role": "prefill"})

    assert reply.status_code == 409
    assert "decode-1 is the only decode worker" in reply.json()["error"]["message"]


async def test_an_encode_worker_is_shown_and_takes_no_requests(
    router: RunningRouter, stub: ClusterStub
) -> None:
    view = router.router.view
    assert "encode" not in await pools(router)
    compatibility = view.compatibility()
    worker = ScriptedWorker(
        view.redis,
        view.cluster,
        fingerprint=view.model_fingerprint,
        worker_id="encode-0",
        role="encode",
    )
    worker.max_model_len = 0
    await worker.start()
    try:
        await eventually(lambda: any(w.record.role == "encode" for w in view.known()))
        assert (await pools(router))["encode"]["ready"] == 1
        state = (await router.admin.get("/v1/cluster")).json()
        shown = {each["worker_id"]: each for each in state["workers"]}["encode-0"]
        assert (shown["pool"], shown["compatible"]) == ("encode", True)
        assert all(w.role != "encode" for w in view.snapshots())
        assert (view.compatibility(), view.max_model_len()) == (compatibility, 2048)
        reply = await router.admin.post(path("encode-0"), json={})
        assert reply.status_code == 400
        assert "encode-0 is an encode worker" in reply.json()["error"]["message"]
        router.script(saying([1, 2, 3]))
        answer = await router.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        audited = await router.admin.post("/v1/cluster/index/verify", json={"all": True})
        assert "encode-0" not in audited.text
    finally:
        await worker.stop()
    await eventually(lambda: all(w.record.role != "encode" for w in view.known()))


@pytest.mark.parametrize(
    ("worker_id", "body", "status", "named"),
    [
        ("decode-9", {}, 404, "there are: decode-0, decode-1"),
        ("decode-0", {"role": "router"}, 400, "must be prefill or decode"),
        ("decode-0", {"role": 3}, 400, "must be prefill or decode"),
        ("decode-0", {"rolle": "decode"}, 400, "rolle"),
    ],
)
async def test_what_cannot_be_is_refused_and_says_why(
    router: RunningRouter, worker_id: str, body: dict[str, object], status: int, named: str
) -> None:
    reply = await router.admin.post(path(worker_id), json=body)

    assert reply.status_code == status
    assert named in reply.json()["error"]["message"]


async def test_a_worker_that_drains_is_not_flipped(
    router: RunningRouter, stub: ClusterStub
) -> None:
    router.workers[0].state = "draining"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.SetWorkerRole(pb.SetWorkerRoleRequest(worker_id="decode-0"))

    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "it is draining" in str(refused.value.details())


async def test_prefix_caches_are_reset_at_all_workers_or_at_one(
    router: RunningRouter, stub: ClusterStub
) -> None:
    first, second = router.workers
    first.cached_blocks, second.cached_blocks = 7, 5
    headers = {"content-type": "application/json"}  # and no body, as vLLM's clients
    reply = await router.admin.post("/reset_prefix_cache", headers=headers)
    assert reply.json() == {"dropped_blocks": {"decode-0": 7, "decode-1": 5}}
    first.cached_blocks, second.cached_blocks = 3, 4
    reply = await router.admin.post("/reset_prefix_cache", json={"worker_id": "decode-1"})
    assert reply.json() == {"dropped_blocks": {"decode-1": 4}}
    assert first.cached_blocks == 3

    done = await stub.ResetPrefixCache(pb.ResetWorkersCacheRequest(worker_id="decode-0"))
    assert dict(done.dropped_blocks) == {"decode-0": 3}
    done = await stub.ResetPrefixCache(pb.ResetWorkersCacheRequest())
    assert dict(done.dropped_blocks) == {"decode-0": 0, "decode-1": 0}


async def test_a_worker_that_does_not_reset_is_named_and_the_others_do(
    router: RunningRouter,
) -> None:
    first, second = router.workers
    first.cached_blocks, second.cached_blocks = None, 5
    try:
        reply = await router.admin.post("/reset_prefix_cache", json={})
        assert reply.status_code == 503
        assert (
            "decode-0 did not complete the call ResetPrefixCache"
            in reply.json()["error"]["message"]
        )
        assert second.cached_blocks == 0
    finally:
        first.cached_blocks = 0


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"worker_id": "decode-9"}, 404, "there are: decode-0, decode-1"),
        ({"worker_id": 3}, 400, "worker_id must be"),
        ({"worker": "decode-0"}, 400, "allowed: worker_id"),
    ],
)
async def test_a_wrong_reset_is_refused_and_says_why(
    router: RunningRouter, body: dict[str, object], status: int, named: str
) -> None:
    reply = await router.admin.post("/reset_prefix_cache", json=body)
    assert reply.status_code == status
    assert named in reply.json()["error"]["message"]


async def test_sizes_wait_for_the_controller_while_the_first_head_starts(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_owner, "_CONTROLLER_START_S", 0.1)
    view = router.router.view
    key = f"{{tandem:{view.cluster.cluster_id}}}"
    await view.redis.set(f"{key}:head", msgspec.json.encode(Head(0, "")))
    await eventually(lambda: view.control.head_is_starting)
    asked = asyncio.create_task(router.admin.post("/v1/cluster", json={"decode": 2}))
    await asyncio.sleep(0.5)
    assert not asked.done()
    await view.redis.set(f"{key}:pools", "{}")
    assert (await asked).status_code == 202
    assert json.loads(await view.redis.rpop(f"{key}:scale")) == {"decode": 2}
    await view.redis.delete(f"{key}:pools", f"{key}:head")


async def test_grpc_tells_and_sets_sizes(router: RunningRouter, stub: ClusterStub) -> None:
    state = await stub.GetCluster(pb.GetClusterRequest())
    assert [(p.name, p.ready, p.serving) for p in state.pools] == [
        ("prefill", 0, 0),
        ("decode", 2, 2),
    ]
    assert [(w.worker_id, w.role, w.pool, w.num_ranks) for w in state.workers] == [
        ("decode-0", "decode", "decode", 1),
        ("decode-1", "decode", "decode", 1),
    ]
    view = router.router.view
    key = f"{{tandem:{view.cluster.cluster_id}}}"
    asked = pb.ScalePoolsRequest(sizes={"prefill": 3, "decode": 0})
    with pytest.raises(grpc.aio.AioRpcError) as unowned:
        await stub.ScalePools(asked)
    assert unowned.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "no pool controller" in str(unowned.value.details())

    await view.redis.set(f"{key}:pools", "{}")
    reply = await stub.ScalePools(asked)
    assert dict(reply.wanted) == {"prefill": 3, "decode": 0}
    taken = await view.redis.rpop(f"{key}:scale")
    assert json.loads(taken) == {"prefill": 3, "decode": 0}
    await view.redis.delete(f"{key}:pools")

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ScalePools(pb.ScalePoolsRequest(sizes={"router": 0}))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the size of the pool router must be an integer from 1 to 64" in str(
        refused.value.details()
    )
