"""A router whose workers report a long queue refuses requests early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from msgspec.structs import replace

from tandem.cluster.operate import show_status
from tandem.common.perf_model.rates import PairRate, PrefillRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import Say, refusal, refusing, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

ROUTER = {"ttft_limit_s": 4.0}  # 3 s are believed
RATES = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), step_tokens=100, measured=True)


@pytest_asyncio.fixture(loop_scope="module")
async def router(router: RunningRouter) -> AsyncIterator[RunningRouter]:
    yield router
    await tell_load(router, 0)


async def tell_load(router: RunningRouter, queued_tokens: int, **load: int) -> None:
    """Every worker tells this queue, and that a token of it takes 1 ms."""
    for worker in router.workers:
        worker.rates = RATES
        worker.pairs = {"prefill-9": PairRate("nixl", 1e-3, 1.5e9, num_pulls=99)}
        worker.load = WorkerLoad(
            queue_max=8, blocks_total=1000, queued_tokens=queued_tokens, **load
        )
        await worker.write_record()
    known = router.router.view.known
    told = router.workers[0].load
    shown = (told.queued_tokens, told.num_waiting)
    await eventually(
        lambda: all((w.load.queued_tokens, w.load.num_waiting) == shown for w in known())
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_refuses_what_would_come_too_late(router: RunningRouter, stream: bool) -> None:
    await tell_load(router, 12_345)
    before = router.outcomes().get("overloaded", 0)
    answer = await router.http.post("/v1/completions", json={"prompt": [5], "stream": stream})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "10"  # 12.346 s to the first token, less 3 s
    error = answer.json()["error"]
    assert error["code"] == "overloaded"
    assert error["retry_after_s"] == 10
    assert "in 10 s" in error["message"]
    assert not router.submitted
    assert router.outcomes()["overloaded"] == before + 1


async def test_refuses_while_too_many_wait_for_a_running_slot(router: RunningRouter) -> None:
    router.router.generator.metrics.demand.ended(100)  # so long are answers here
    await tell_load(router, 0, num_running=2, num_running_slots=2, num_waiting=10**6)
    answer = await router.http.post("/v1/completions", json={"prompt": [5]})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    assert not router.submitted


async def test_status_shows_what_workers_measured(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    await tell_load(router, 77)
    await asyncio.to_thread(show_status, str(router.admin.base_url))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode-")]
    assert len(rows) == 2
    assert all("1000 tok/s, 10+1n ms" in row for row in rows)
    assert all("prefill-9 nixl 1.5 GB/s" in row for row in rows)


async def test_grpc_is_told_when_to_come_back(router: RunningRouter) -> None:
    await tell_load(router, 12_345)
    address = f"127.0.0.1:{router.router.grpc_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in InferenceStub(channel).Generate(pb.GenerateRequest(text="x")):
                pass
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(raised.value.trailing_metadata() or ())
    assert trailers["tandem-code"] == "overloaded"
    assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("10", "10000")


async def test_streams_go_on_and_the_next_is_taken_when_the_queue_is_short(
    router: RunningRouter,
) -> None:
    await tell_load(router, 0)
    go_on = asyncio.Event()

    async def halting(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        say(update(submit, [1000]))
        await go_on.wait()
        say(update(submit, [1001], "length"))

    router.script(halting)
    body = {"prompt": "x", "max_tokens": 2, "return_token_ids": True}
    running = asyncio.create_task(router.http.post("/v1/completions", json=body))
    await eventually(lambda: bool(router.submitted))
    await tell_load(router, 12_345)
    assert (await router.http.post("/v1/completions", json=body)).status_code == 429
    go_on.set()
    assert (await running).json()["choices"][0]["token_ids"] == [1000, 1001]
    await tell_load(router, 2_000)
    router.script(saying([1000, 1001]))
    assert (await router.http.post("/v1/completions", json=body)).status_code == 200


async def test_a_request_that_a_load_cannot_show_yet_still_counts(router: RunningRouter) -> None:
    """The worker tells its load while a submission is on its way to it."""
    await tell_load(router, 0)
    worker, other = router.workers
    other.state = "draining"
    await other.write_record()
    view = router.router.view
    await eventually(lambda: not view.roster().by_id[other.worker_id].usable)
    client = view.client(worker.worker_id)
    assert client is not None
    already = client._num_reported + len(client.unreported)
    body = {"prompt": [5] * 40, "max_tokens": 1}
    asked = [asyncio.create_task(router.http.post("/v1/completions", json=body)) for _ in range(2)]
    await eventually(lambda: len(router.submitted) == 2)

    def counted() -> tuple[int, int]:
        load = view.roster().by_id[worker.worker_id].load
        return load.num_waiting, load.queued_tokens

    for seen, step in ((0, 1), (1, 2), (2, 3)):
        worker.load = WorkerLoad(queue_max=8, blocks_total=1000, step=step)
        worker.tell_load(already + seen)
        await eventually(lambda step=step: view.known()[0].load.step == step)  # type: ignore[misc]
        assert counted() == (2 - seen, 40 * (2 - seen))
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    other.state = "ready"
    await other.write_record()
    await eventually(lambda: view.roster().by_id[other.worker_id].usable)


async def test_a_worker_that_expects_a_late_first_token_refuses_and_another_is_asked(
    router: RunningRouter,
) -> None:
    """A worker knows its queue when requests of several routers meet there."""
    await tell_load(router, 0)
    answers = iter([refusing("overloaded", 7.0), saying([1000])])

    async def first_refuses(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        await next(answers)(submit, say)

    router.script(first_refuses)
    body = {"prompt": "x", "max_tokens": 1, "return_token_ids": True}
    answer = await router.http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["token_ids"] == [1000]
    name = answer.headers["x-request-id"]
    found = [submit for submit in router.submitted if submit.request_id == name]
    first, second = sorted(found, key=lambda submit: submit.attempt)
    assert 0 < second.first_token_s <= first.first_token_s <= 4.0
    assert (first.attempt, second.attempt) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_told_when_all_workers_expect_a_late_first_token(
    router: RunningRouter, stream: bool
) -> None:
    await tell_load(router, 0)
    router.script(refusing("overloaded", 7.0))
    before = router.outcomes().get("overloaded", 0)
    answer = await router.http.post("/v1/completions", json={"prompt": [5], "stream": stream})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.headers["retry-after"] == "7"
    assert router.outcomes()["overloaded"] == before + 1


async def test_a_sequence_that_is_handed_back_goes_to_the_other_worker(
    router: RunningRouter,
) -> None:
    """It has not begun: this is no migration and no loss."""
    await tell_load(router, 0)
    asked: list[str] = []

    async def first_returns(submit: worker_pb2.SubmitSequence, say: Say) -> None:
        asked.append(submit.request_id)
        if len(asked) == 1:
            assert submit.may_return
            say(refusal(submit, "returned"))
        else:
            say(update(submit, [1000], "length"))

    router.script(first_returns)
    answer = await router.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1, "return_token_ids": True}
    )
    assert answer.json()["choices"][0]["token_ids"] == [1000]
    took = [sum(s.request_id == asked[0] for s in w.submitted) for w in router.workers]
    assert took == [1, 1]
    found = (await router.http.get(f"/v1/requests/{asked[0]}")).json()
    assert found["moves"] == 0


async def test_a_queue_beside_a_worker_with_room_is_asked_back(router: RunningRouter) -> None:
    for worker in router.workers:
        worker.state = "ready"
    await tell_load(router, 0, num_running_slots=8, step=10)
    full, free = router.workers
    full.load = replace(full.load, num_running=8, num_waiting=5, step=11)

    def is_asked_back() -> bool:
        for worker in router.workers:
            client = router.router.view.client(worker.worker_id)
            assert client is not None
            worker.tell_load(client._num_reported + len(client.unreported))
        return bool(full.asked_back)

    await eventually(is_asked_back)
    assert full.asked_back[0] == 5
    assert not free.asked_back
    full.load = replace(full.load, num_running=0, num_waiting=0, step=12)
    is_asked_back()
