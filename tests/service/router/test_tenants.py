"""The tenant that a gateway names: in the salt of the blocks, and in its turn at busy workers."""

from __future__ import annotations

import asyncio

import grpc.aio
import httpx
import pytest

from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.router.admission.tenants import cache_salt
from tests.harness.scripted_worker import Say, Script, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"trust_tenant_header": True}
TOKEN = "a-token-for-tests"
BODY = {"prompt": "x", "max_tokens": 1}


async def test_the_tenant_salts_the_blocks(router: RunningRouter) -> None:
    router.script(saying([1000]))
    for headers in ({}, {"x-tandem-tenant": "acme"}, {"x-tandem-tenant": "other"}):
        answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
    address = f"127.0.0.1:{router.router.grpc_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        metadata = (("x-tandem-tenant", "acme"),)
        request = pb.GenerateRequest(text="x", max_tokens=1)
        async for _ in InferenceStub(channel).Generate(request, metadata=metadata):
            pass
        embed = pb.EmbedRequest(input=[pb.EmbedInput(text="x")])
        with pytest.raises(
            grpc.aio.AioRpcError, match="does not support embeddings"
        ):  # the script has none
            async for _ in InferenceStub(channel).Embed(embed, metadata=metadata):
                pass
    salts = sorted(s.input.cache_salt for s in router.submitted)  # type: ignore[attr-defined]
    acme, other = (cache_salt(TOKEN, name) for name in ("acme", "other"))
    assert salts == sorted([b"", acme, other, acme, acme])


async def test_two_names_are_refused(router: RunningRouter) -> None:
    headers = [("x-tandem-tenant", "acme"), ("x-tandem-tenant", "other")]
    answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == BadRequest.code
    assert not router.submitted


@pytest.mark.parametrize("value", [b"acme\xa0", b"acme\x85", b"\xa0acme", b"acm\xe9"])
async def test_a_name_beyond_printable_ascii_is_refused(
    router: RunningRouter, value: bytes
) -> None:
    """Stripping the name could make it another tenant's."""
    headers = [(b"x-tandem-tenant", value)]
    answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert "printable ASCII" in answer.json()["error"]["message"]
    assert not router.submitted


async def test_tenants_take_turns_at_busy_workers(router: RunningRouter) -> None:
    order: list[int] = []
    router.script(noting(order))
    other = router.workers[1]
    other.state = "draining"  # with one stream to one worker, what comes first was sent first
    await tell_load(router, queued_tokens=5000, step=1)  # 5 s: no room
    asked = []
    for number, tenant in enumerate(("flood", "flood", "flood", "light", "")):
        headers = {"x-tandem-tenant": tenant} if tenant else {}
        body = {"prompt": [number + 1] * 40, "max_tokens": 1}
        asked.append(
            asyncio.create_task(router.http.post("/v1/completions", json=body, headers=headers))
        )
        await eventually(lambda number=number: num_waiting(router) == number + 1)  # type: ignore[misc]
    assert not router.submitted
    asked[1].cancel()
    await eventually(lambda: num_waiting(router) == 4)
    await tell_load(router, queued_tokens=0, step=2)
    await asyncio.wait(asked)
    other.state = "ready"
    assert [task.result().status_code for task in asked if task is not asked[1]] == [200] * 4
    assert order == [1, 4, 5, 3]


async def test_a_request_that_would_wait_too_long_for_its_turn_is_refused(
    router: RunningRouter,
) -> None:
    """A request of another tenant, which has nobody waiting, is admitted."""
    await tell_load(router, queued_tokens=85_000, step=3)  # 85 s, of 90 that are believed
    router.script(saying([1000]))

    async def ask(tenant: str, tokens: int) -> int:
        body = {"prompt": [5] * tokens, "max_tokens": 1}
        headers = {"x-tandem-tenant": tenant}
        return (await router.http.post("/v1/completions", json=body, headers=headers)).status_code

    waiting = [asyncio.create_task(ask("flood", 2000)) for _ in range(8)]
    await eventually(lambda: num_waiting(router) + sum(t.done() for t in waiting) == 8)
    light = asyncio.create_task(ask("light", 2000))
    await eventually(lambda: num_waiting(router) + sum(t.done() for t in waiting) == 9)
    assert 0 < sum(t.done() for t in waiting) < 8
    assert not light.done()
    await tell_load(router, queued_tokens=0, step=4)
    assert await light == 200
    assert set(await asyncio.gather(*waiting)) == {200, 429}


async def start(
    router: RunningRouter, *asked: tuple[str, dict[str, str], dict[str, int]]
) -> list[asyncio.Task[httpx.Response]]:
    """Sends requests of (tenant, headers, fields) one after another while no worker has capacity.
    The first token of each prompt is its number, from 1 on."""
    tasks: list[asyncio.Task[httpx.Response]] = []
    for number, (tenant, headers, fields) in enumerate(asked, 1):
        body = {"prompt": [number] * 40, "max_tokens": 1, "stream": True, **fields}
        told = {"x-tandem-tenant": tenant, **headers}
        tasks.append(
            asyncio.create_task(router.http.post("/v1/completions", json=body, headers=told))
        )
        await eventually(lambda: num_waiting(router) + sum(t.done() for t in tasks) == len(tasks))
    return tasks


async def test_priorities_and_sessions_order_the_turns_of_a_tenant(router: RunningRouter) -> None:
    order: list[int] = []
    router.script(noting(order))
    other = router.workers[1]
    other.state = "draining"
    await tell_load(router, queued_tokens=5000, step=5)
    tasks = await start(
        router,
        ("a", {"x-session-id": "long"}, {}),
        ("a", {"x-session-id": "long"}, {}),
        ("a", {"x-session-id": "short"}, {}),
        ("a", {}, {"priority": 7}),
        ("a", {"x-tandem-may-shed": "1"}, {"priority": -7}),
        ("a", {}, {"priority": -1}),
    )
    await tell_load(router, queued_tokens=0, step=6)
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 6
    other.state = "ready"
    assert order == [6, 1, 3, 2, 4, 5]
    answer = await router.http.get(f"/v1/requests/{tasks[5].result().headers['x-request-id']}")
    assert answer.json()["priority"] == -1


async def test_a_deadline_and_a_full_queue_refuse_before_the_head(router: RunningRouter) -> None:
    """Also of streams, whose head would say 200."""
    await tell_load(router, queued_tokens=5000, step=7)
    router.script(saying([1000]))
    queues = router.router.generator._services.dispatcher.admission._tenant_queues
    waiting_max, queues.waiting_max = queues.waiting_max, 2
    outcomes = router.outcomes()
    try:
        long, shed, short, kept, extra = await start(
            router,
            ("a", {"x-tandem-deadline-ms": "20000"}, {}),
            ("b", {"x-tandem-may-shed": "1"}, {}),
            ("a", {"x-tandem-deadline-ms": "4000"}, {}),
            ("a", {}, {}),
            ("a", {}, {}),
        )
        assert (await shed).status_code == 429
        assert shed.result().json()["error"]["code"] == "queue_full"
        assert (await extra).status_code == 429  # of the tenant that has the most waiting
        assert (await short).status_code == 429
        assert short.result().json()["error"]["code"] == "overloaded"
        assert not router.submitted
    finally:
        queues.waiting_max = waiting_max
        await tell_load(router, queued_tokens=0, step=8)
    assert [(await one).status_code for one in (long, kept)] == [200, 200]
    ended = {code: n - outcomes.get(code, 0) for code, n in router.outcomes().items()}
    assert {code: n for code, n in ended.items() if n} == {
        "queue_full": 2,
        "overloaded": 1,
        "length": 2,
    }


@pytest.mark.parametrize("value", ["0", "soon"])
async def test_a_wrong_deadline_is_refused(router: RunningRouter, value: str) -> None:
    headers = {"x-tandem-deadline-ms": value}
    answer = await router.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 400
    assert "x-tandem-deadline-ms must be an integer from 1" in answer.json()["error"]["message"]


def num_waiting(router: RunningRouter) -> float:
    return router.router.generator.metrics.requests_pending._value.get()


def noting(order: list[int]) -> Script:
    """Says one token, and notes the first of the prompt."""

    async def script(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        order.append(submit.input.token_ids[0])
        say(update(submit, [1000], "length"))

    return script


async def tell_load(router: RunningRouter, *, queued_tokens: int, step: int) -> None:
    """Every worker tells this queue, and that it has seen all that was submitted."""
    rates = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), step_tokens=100, measured=True)
    for worker in router.workers:
        worker.rates = rates
        worker.load = WorkerLoad(
            queue_max=8, blocks_total=1000, queued_tokens=queued_tokens, step=step
        )
        await worker.write_record()
    known = router.router.view.known
    states = {w.worker_id: w.state for w in router.workers}
    await eventually(
        lambda: all(
            w.record.rates == rates and w.record.state == states[w.record.worker_id]
            for w in known()
        )
    )
    for worker in router.workers:
        worker.tell_load(1 << 40)
    await eventually(lambda: all(w.load.step == step for w in known()))
