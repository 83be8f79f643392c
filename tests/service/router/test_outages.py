"""A router without workers, with incompatible ones, and without Redis."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from tandem.api.server import Router
from tandem.cluster.processes.embedded_redis import EmbeddedRedis
from tandem.common.config.cluster import ClusterConfig
from tandem.common.config.router import RouterConfig
from tandem.common.perf_model.rates import PrefillRate, WorkerRates
from tandem.common.worker_load import WorkerLoad
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.client import connect
from tests.counted_turns import note_counted
from tests.harness.scripted_worker import Say, ScriptedWorker, saying, silent, update
from tests.service.router.conftest import ANY_ADMIN_PORTS, MODEL, eventually

pytestmark = pytest.mark.service

BODY = {"prompt": "x", "max_tokens": 1}


@dataclass
class Setup:
    router: Router
    http: httpx.AsyncClient
    redis: EmbeddedRedis
    cluster: ClusterConfig
    stack: AsyncExitStack
    workers: list[ScriptedWorker] = field(default_factory=list)

    async def add_worker(self, worker_id: str, **more: object) -> ScriptedWorker:
        redis = await self.stack.enter_async_context(connect(self.redis.url))
        more = {"fingerprint": resolve(MODEL).fingerprint, "script": saying([1000]), **more}
        worker = ScriptedWorker(redis, self.cluster, worker_id=worker_id, **more)  # type: ignore[arg-type]
        self.stack.push_async_callback(worker.stop)
        return await worker.start()

    def usable(self) -> list[str]:
        return sorted(s.worker_id for s in self.router.view.snapshots() if s.usable)


@pytest.fixture
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    """A router without workers, on a Redis of its own."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        cluster = ClusterConfig("outages", redis.url, "a-token-for-tests", record_ttl_s=2.0)
        config = RouterConfig(
            cluster=cluster,
            model=MODEL,
            served_model_name="tiny",
            http_port=0,
            grpc_port=0,
            admin=ANY_ADMIN_PORTS,
            **{"hold_deadline_s": 1.5, "hold_requests_max": 2, **getattr(request, "param", {})},
        )
        router = Router(config)
        task = asyncio.create_task(router.run())
        stack.push_async_callback(asyncio.wait, [task])
        stack.callback(router.stop)
        await router.listening.wait()
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=20)
        )
        await eventually(lambda: router.generator.model is not None)
        yield Setup(router, http, redis, cluster, stack)


async def test_holds_requests_while_there_is_no_decode_worker(setup: Setup) -> None:
    await setup.add_worker("prefill-0", role="prefill")
    await eventually(lambda: setup.usable() == ["prefill-0"])
    # Two are held, a third is one too many; nobody comes for them.
    answers = await asyncio.gather(
        *(setup.http.post("/v1/completions", json=BODY) for _ in range(3))
    )
    assert [a.status_code for a in answers] == [503] * 3
    messages = [a.json()["error"]["message"] for a in answers]
    assert sorted("already wait for a decode worker" in m for m in messages) == [False, False, True]
    assert all("retry-after" in a.headers for a in answers)


@pytest.mark.parametrize("setup", [{"hold_deadline_s": 30.0}], indirect=True)
async def test_serves_what_it_held_when_a_worker_comes(setup: Setup) -> None:
    prefill = await setup.add_worker("prefill-0", role="prefill")
    await eventually(lambda: setup.usable() == ["prefill-0"])
    held = asyncio.create_task(setup.http.post("/v1/completions", json=BODY))
    decode = await setup.add_worker("decode-0")
    assert (await held).status_code == 200
    (candidate,) = decode.submitted[0].prefill_candidates
    assert (candidate.worker_id, candidate.address) == ("prefill-0", prefill.address)


LONG_HOLD = {"hold_deadline_s": 30.0, "trust_tenant_header": True}


@pytest.mark.parametrize("setup", [LONG_HOLD], indirect=True)
async def test_a_held_request_counts_once_for_its_tenant(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_s = note_counted(monkeypatch)
    rates = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), step_tokens=100, measured=True)
    await setup.add_worker("prefill-0", role="prefill", rates=rates)
    await eventually(lambda: setup.usable() == ["prefill-0"])
    body = {"prompt": [5] * 40, "max_tokens": 1}
    held = asyncio.create_task(setup.http.post("/v1/completions", json=body))
    await eventually(lambda: setup.router.generator._services.dispatcher.num_pending == 1)
    assert sum(counted_s) == pytest.approx(0.0, abs=1e-3)  # while it waits, it counts nothing
    await setup.add_worker("decode-0", rates=rates)
    assert (await held).status_code == 200
    await eventually(lambda: sum(counted_s) > 0)
    assert sum(counted_s) == pytest.approx(0.040, rel=0.1)


@pytest.mark.parametrize("setup", [LONG_HOLD], indirect=True)
async def test_a_held_request_ends_at_its_deadline(setup: Setup) -> None:
    """Also one that a worker had accepted before it was lost."""
    headers = {"x-tandem-deadline-ms": "400"}
    began = time.monotonic()
    answer = await setup.http.post("/v1/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert 0.4 <= time.monotonic() - began < 5
    worker = await setup.add_worker("decode-0", script=silent)
    await eventually(lambda: setup.usable() == ["decode-0"])
    headers = {"x-tandem-deadline-ms": "1500"}
    began = time.monotonic()
    asked = asyncio.create_task(setup.http.post("/v1/completions", json=BODY, headers=headers))
    await eventually(lambda: len(worker.submitted) == 1)
    await worker.stop()
    assert (await asked).status_code == 429
    assert 1.5 <= time.monotonic() - began < 10


async def test_is_not_ready_when_the_workers_serve_another_model(setup: Setup) -> None:
    wrong = await setup.add_worker("decode-0", fingerprint="another model")
    await eventually(lambda: len(setup.router.view.known()) == 1)
    assert (await setup.http.get("/started")).status_code == 200  # it takes requests, which wait
    answer = await setup.http.get("/ready")
    assert answer.status_code == 503
    assert "another model" in answer.json()["error"]["message"]
    assert (await setup.http.post("/v1/completions", json=BODY)).status_code == 503
    assert not wrong.submitted


async def test_leaves_draining_workers_alone(setup: Setup) -> None:
    draining = await setup.add_worker("decode-1")
    good = await setup.add_worker("decode-2")
    await eventually(lambda: setup.usable() == ["decode-1", "decode-2"])
    draining.state = "draining"
    await eventually(lambda: setup.usable() == ["decode-2"])
    for _ in range(4):
        assert (await setup.http.post("/v1/completions", json=BODY)).status_code == 200
    assert len(good.submitted) == 4
    assert not draining.submitted


async def test_a_live_stream_ends_whole_while_the_router_drains(setup: Setup) -> None:
    release = asyncio.Event()

    async def script(submit: pb.SubmitSequence, say: Say) -> None:
        say(update(submit, [1000]))
        await release.wait()
        say(update(submit, [1001], "length"))

    await setup.add_worker("decode-0", script=script)
    await eventually(lambda: setup.usable() == ["decode-0"])
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    async with setup.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        setup.router.stop()
        await eventually(lambda: not _listens(setup.router.http_port))
        release.set()
        rest = [line async for line in lines if line]
    assert len(rest) == 2
    assert rest[-1] == "data: [DONE]"


async def test_a_worker_with_an_expired_record_is_gone(setup: Setup) -> None:
    """Its stream may still be up: a process that hangs keeps its connections."""
    worker = await setup.add_worker("decode-0")
    await eventually(lambda: setup.usable() == ["decode-0"])
    await worker.keep_no_record()
    await eventually(lambda: not setup.router.view.known())


async def test_workers_that_stood_still_with_the_router_are_not_gone(setup: Setup) -> None:
    """A laptop that slept is such a case: the records have expired when all wake, the router
    first."""
    worker = await setup.add_worker("decode-0")
    await eventually(lambda: setup.usable() == ["decode-0"])
    await worker.keep_no_record()
    time.sleep(setup.cluster.record_ttl_s + 0.2)  # noqa: ASYNC251 # worker and router are here
    for _ in range(3):
        assert (await setup.http.post("/v1/completions", json=BODY)).status_code == 200
        await asyncio.sleep(0.4)
    # One that does not wake is gone all the same.
    await eventually(lambda: not setup.router.view.known())


async def test_no_request_fails_while_redis_is_killed_and_restarted(setup: Setup) -> None:
    async def slowly(submit: pb.SubmitSequence, say: Say) -> None:
        for index in range(5):
            await asyncio.sleep(0.02)
            say(update(submit, [1000], "length" if index == 4 else ""))

    for number in range(2):
        await setup.add_worker(f"decode-{number}", script=slowly)
    await eventually(lambda: len(setup.usable()) == 2)
    statuses: list[int] = []
    going_on = True

    async def client() -> None:
        while going_on:
            body = {"prompt": "x", "max_tokens": 5}
            statuses.append((await setup.http.post("/v1/completions", json=body)).status_code)

    clients = [asyncio.create_task(client()) for _ in range(8)]
    view = setup.router.view
    await eventually(lambda: len(statuses) > 16)
    setup.redis.kill()
    await eventually(lambda: view.redis_state == "lost")
    # Longer than a record lives.
    num_before = len(statuses)
    await eventually(lambda: len(statuses) > num_before + 200, deadline_s=60)
    setup.redis.restart()
    await eventually(lambda: view.redis_state == "ok")
    num_before = len(statuses)
    await eventually(lambda: len(statuses) > num_before + 50, deadline_s=60)
    going_on = False
    await asyncio.gather(*clients)
    assert set(statuses) == {200}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("setup", [{"trust_tenant_header": True}], indirect=True)
async def test_nobody_is_refused_or_held_by_a_load_that_redis_cannot_renew(setup: Setup) -> None:
    prefill = await setup.add_worker("prefill-0", role="prefill")
    decode = await setup.add_worker("decode-0")
    for worker in (prefill, decode):
        worker.rates = WorkerRates(PrefillRate(0.0, 1e-3, 0.0), step_tokens=100, measured=True)
        worker.load = WorkerLoad(blocks_total=1000, queued_tokens=10**6)
        await worker.write_record()
    view = setup.router.view
    await eventually(lambda: sum(w.load.queued_tokens for w in view.known()) == 2 * 10**6)
    await eventually(lambda: setup.usable() == ["decode-0", "prefill-0"])
    assert (await setup.http.post("/v1/completions", json=BODY)).status_code == 429
    setup.redis.kill()
    await eventually(lambda: view.redis_state == "lost")
    assert (await setup.http.post("/v1/completions", json=BODY)).status_code == 200
    setup.redis.restart()
    await eventually(lambda: view.redis_state == "ok")


@pytest.mark.parametrize("speaks", [False, True])
async def test_a_worker_whose_record_expires_keeps_requests_while_its_stream_speaks(
    setup: Setup, speaks: bool
) -> None:
    """A process that is stopped or cut off says nothing on either."""

    async def slowly(submit: pb.SubmitSequence, say: Say) -> None:
        while speaks and submit.request_id not in first.cancelled:
            say(update(submit, [1000], "length" if is_over else ""))
            await asyncio.sleep(0.1)

    is_over = False
    first = await setup.add_worker("decode-0", script=slowly)
    await eventually(lambda: setup.usable() == ["decode-0"])
    body = {**BODY, "max_tokens": 1000, "ignore_eos": True}
    asked = asyncio.create_task(setup.http.post("/v1/completions", json=body))
    await eventually(lambda: first.submitted)
    second = await setup.add_worker("decode-1", script=saying([1001] * 1000))
    await first.keep_no_record()
    await eventually(lambda: setup.usable() == ["decode-1"])
    await asyncio.sleep(1.0)
    is_over = True
    answer = await asyncio.wait_for(asked, 10)
    assert answer.status_code == 200, answer.text
    assert len(second.submitted) == (not speaks)
