"""A front places a request where the endpoint picker's hint says, its prefill worker too."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tandem.common.config.gateway import GatewayOptions
from tandem.models.source import resolve
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.store.client import connect
from tandem.router.placement.hint import HINT_HEADER, PlacementHint, sign
from tests.harness.scripted_worker import ScriptedWorker, saying
from tests.service.router.conftest import MODEL, RunningRouter, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTER = {"gateway": GatewayOptions(front_of="decode-1")}
BUSY = "prefill-0"
IDLE = "prefill-1"
_numbers = itertools.count(1)


@pytest_asyncio.fixture(loop_scope="module")
async def front(router: RunningRouter) -> AsyncIterator[RunningRouter]:
    """A front of decode-1, and two prefill workers, of which one has much to do."""
    cluster = router.router.view.cluster
    async with connect(cluster.redis_url) as redis:
        fingerprint = resolve(MODEL).fingerprint
        prefills = [
            ScriptedWorker(redis, cluster, fingerprint=fingerprint, worker_id=name, role="prefill")
            for name in (BUSY, IDLE)
        ]
        prefills[0].load = msgspec.structs.replace(prefills[0].load, queued_tokens=50_000)
        for worker in prefills:
            await worker.start()
        known = lambda: {w.worker_id: w for w in router.router.view.snapshots()}  # noqa: E731
        await eventually(lambda: {BUSY, IDLE} <= known().keys())
        assert known()[BUSY].load.queued_tokens == 50_000
        router.script(saying([1000]))
        try:
            yield router
        finally:
            for worker in prefills:
                await worker.stop()
            await eventually(lambda: not {BUSY, IDLE} & known().keys())


async def placed(front: RunningRouter, hint: PlacementHint | None, token: str = "") -> list[str]:
    """Sends one request, and returns its decode worker and its prefill workers, in their order."""
    cluster = front.router.view.cluster
    headers = {"x-request-id": hint.request_id if hint is not None else f"r{next(_numbers)}"}
    if hint is not None:
        headers[HINT_HEADER] = sign(hint, token or cluster.token)
    body = {"prompt": [1000] * 200, "max_tokens": 1}
    for worker in front.workers:
        worker.submitted.clear()
    answer = await front.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    ((worker, submit),) = [(w, s) for w in front.workers for s in w.submitted]
    assert isinstance(submit, pb.SubmitSequence)
    return [worker.worker_id, *(c.worker_id for c in submit.prefill_candidates)]


def hint_of(decode: str, prefill: str) -> PlacementHint:
    return PlacementHint(f"r{next(_numbers)}", time.time(), decode, prefill)


async def hints(admin: httpx.AsyncClient) -> dict[str, float]:
    text = (await admin.get("/metrics")).text
    return {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tandem_placement_hints_total"
    }


async def test_a_hint_places_at_both_workers_that_the_picker_chose(front: RunningRouter) -> None:
    """The other worker would win each time: it has less to do, and a smaller share of late."""
    before = await hints(front.admin)
    for _ in range(4):
        assert await placed(front, hint_of("decode-1", BUSY)) == ["decode-1", BUSY, IDLE]
        assert (await placed(front, None))[1:] == [IDLE, BUSY]
    assert await placed(front, hint_of("decode-1", IDLE)) == ["decode-1", IDLE, BUSY]
    after = await hints(front.admin)
    assert after == {**before, "followed": before.get("followed", 0) + 5}


async def test_a_prefill_worker_that_is_gone_is_not_waited_for(front: RunningRouter) -> None:
    await placed(front, hint_of("decode-1", BUSY))
    assert await placed(front, hint_of("decode-1", "prefill-9")) == ["decode-1", IDLE, BUSY]


async def test_a_hint_of_another_front_or_of_a_stranger_places_nothing(
    front: RunningRouter,
) -> None:
    before = await hints(front.admin)
    for hint, token in ((hint_of("decode-0", BUSY), ""), (hint_of("decode-1", BUSY), "strange")):
        await placed(front, hint_of("decode-1", BUSY))
        assert (await placed(front, hint, token))[1:] == [IDLE, BUSY]
    after = await hints(front.admin)
    changed = {name: after[name] - before.get(name, 0) for name in after}
    assert changed == {"followed": 2, "other_worker": 1, "invalid": 1}
