"""Workers are told to leave, and the router itself leaves without ending a stream."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.cluster.operate import drain_worker
from tandem.errors import NotNow, OperateError, WorkerLost
from tandem.net.rpc.tandem.v1 import cluster_pb2
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.security.audit_trail import AuditTrail, Caller
from tandem.router.scaling.control import ClusterControl
from tests.harness.scripted_worker import Say, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DRAIN = "/v1/cluster/workers/{}/drain"


async def test_a_worker_is_told_to_leave(router: RunningRouter) -> None:
    worker = router.workers[0]
    for body in ({}, {"deadline_s": 12.5}):
        answer = await router.admin.post(DRAIN.format("decode-0"), json=body)
        assert (answer.status_code, answer.json()) == (202, {"draining": "decode-0"})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.admin.grpc_port}") as channel:
        request = cluster_pb2.DrainWorkerRequest(worker_id="decode-0", deadline_s=3)
        await ClusterStub(channel).DrainWorker(request, timeout=5)
        request.worker_id = "nobody"
        with pytest.raises(grpc.aio.AioRpcError, match="there are: decode-0, decode-1") as raised:
            await ClusterStub(channel).DrainWorker(request, timeout=5)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert worker.drains == [0, 12.5, 3]
    assert not router.workers[1].drains


async def test_the_last_decode_worker_is_drained_only_by_force(router: RunningRouter) -> None:
    last, other = router.workers
    before = list(last.drains)
    view = router.router.view
    (epoch,) = (w.record.epoch for w in view.known() if w.record.worker_id == last.worker_id)
    other.state = "draining"
    await other.write_record()
    await eventually(lambda: not view.has_decode_worker(frozenset({epoch})))
    try:
        refused = await router.admin.post(DRAIN.format("decode-0"), json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_now")
        assert "--force" in refused.json()["error"]["message"]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{router.router.admin.grpc_port}"
        ) as channel:
            stub = ClusterStub(channel)
            request = cluster_pb2.DrainWorkerRequest(worker_id="decode-0")
            with pytest.raises(grpc.aio.AioRpcError, match="--force"):
                await stub.DrainWorker(request, timeout=5)
            with pytest.raises(OperateError, match="--force"):
                await asyncio.to_thread(
                    drain_worker, str(router.admin.base_url), "decode-0", deadline_s=1
                )
            assert last.drains == before
            request.force = True
            await stub.DrainWorker(request, timeout=5)
        answer = await router.admin.post(DRAIN.format("decode-0"), json={"force": True})
        assert answer.status_code == 202
        assert last.drains == [*before, 0, 0]
    finally:
        other.state = "ready"
        await other.write_record()
        await eventually(lambda: view.has_decode_worker(frozenset({epoch})))


async def test_two_drains_at_once_leave_a_decode_worker(router: RunningRouter) -> None:
    paths = [DRAIN.format(worker.worker_id) for worker in router.workers]
    answers = await asyncio.gather(*(router.admin.post(path, json={}) for path in paths))
    assert sorted(answer.status_code for answer in answers) == [202, 409]
    (refused,) = (answer for answer in answers if answer.status_code == 409)
    assert "the only decode worker that stays" in refused.json()["error"]["message"]


async def test_two_drains_at_once_by_two_routers_leave_a_decode_worker(
    router: RunningRouter,
) -> None:
    one = router.router
    trail = AuditTrail(one.view.redis, one.view.cluster.cluster_id, router_id="router-1")
    controls = [ClusterControl(one._config, one.view, trail) for _ in range(2)]
    await one.view.redis.delete(f"{{tandem:{one.view.cluster.cluster_id}}}:departures")
    drains = [
        control.drain(worker.worker_id, 0.0, who=Caller("a test"))
        for control, worker in zip(controls, router.workers, strict=True)
    ]
    outcomes = await asyncio.gather(*drains, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(NotNow) == 1
    assert outcomes.count(None) == 1


async def test_a_worker_that_was_not_reached_stays_and_the_other_one_may_leave(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = router.router
    trail = AuditTrail(one.view.redis, one.view.cluster.cluster_id, router_id="router-1")
    control = ClusterControl(one._config, one.view, trail)
    await one.view.redis.delete(f"{{tandem:{one.view.cluster.cluster_id}}}:departures")

    async def lost(*_: object) -> None:
        raise WorkerLost("says the test")

    with monkeypatch.context() as patched:
        patched.setattr(control, "call", lost)
        with pytest.raises(WorkerLost):
            await control.drain("decode-0", 0.0, who=Caller("a test"))
    await control.drain("decode-1", 0.0, who=Caller("a test"))


@pytest.mark.parametrize(
    ("worker_id", "body", "status", "code"),
    [
        ("nobody", {}, 404, "worker_not_found"),
        ("decode-0", {"deadline_s": -1}, 400, "invalid_request"),
        ("decode-0", {"deadline_s": "soon"}, 400, "invalid_request"),
        ("decode-0", {"deadline": 3}, 400, "invalid_request"),
        ("decode-0", {"force": "yes"}, 400, "invalid_request"),
    ],
)
async def test_what_cannot_be_asked(
    router: RunningRouter, worker_id: str, body: dict[str, object], status: int, code: str
) -> None:
    answer = await router.admin.post(DRAIN.format(worker_id), json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_router_that_will_leave_says_so_and_serves_on(router: RunningRouter) -> None:
    """The router of this module is leaving after this test."""
    ids = router.tokenizer.encode("one two")

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, ids, "length"))

    router.script(script)
    router.router.announce_end()
    ready = await router.http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["message"]) == (
        503,
        "this router will shut down soon",
    )
    answer = await router.http.post("/v1/completions", json={"prompt": "x", "max_tokens": len(ids)})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "one two")
    assert answer.headers["connection"] == "close"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(5):
            request = health_pb2.HealthCheckRequest()
            while (await health.Check(request)).status != _NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_router_that_is_stopped_ends_its_streams_first(router: RunningRouter) -> None:
    """The last of this module: the router is gone after it."""
    ids = router.tokenizer.encode("one two three four")
    may_end = asyncio.Event()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, ids[:2]))
        await may_end.wait()
        say(update(submit, ids[2:], "length"))

    router.script(script)
    body = {"prompt": "x", "stream": True, "max_tokens": len(ids)}
    async with router.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        begun = await anext(lines)
        router.router.stop()
        async with asyncio.timeout(5):
            while router.router.generator.not_ready_reason() != "this router is draining":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(base_url=router.http.base_url) as late:
                await late.get("/health")
        may_end.set()
        rest = [line async for line in lines if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in [begun, *rest]]
    assert "".join(e["choices"][0]["text"] for e in events) == "one two three four"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
