"""The usage of an answer says that a KV budget was restarted, where that changes what is kept."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1.inference_pb2 import GetRequestRequest
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.service.router.conftest import RunningRouter, eventually
from tests.service.router.test_migrations import Reading, answer, going_on, split

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

HITTERS = {"kv_budget": {"policy": "heavy_hitters", "tokens": 256}}
WINDOW = {"kv_budget": {"policy": "sinks_window", "tokens": 256}}


@pytest.mark.parametrize(
    ("extra", "num_before", "is_drained", "is_restarted"),
    [
        (HITTERS, 6, False, True),
        (HITTERS, 6, True, True),
        (HITTERS, 0, False, False),  # it had no token yet
        (WINDOW, 6, False, False),
        ({}, 6, True, False),
    ],
)
async def test_only_heavy_hitters_that_went_on_elsewhere_are_marked(
    router: RunningRouter,
    extra: dict[str, Any],
    num_before: int,
    is_drained: bool,
    is_restarted: bool,
) -> None:
    await eventually(lambda: all(worker.has_stream for worker in router.workers))
    ids = answer(router)
    router.script(going_on(ids, num_before))
    for worker in router.workers:
        worker.submitted.clear()
    reading = Reading(router, extra_body=extra)
    await eventually(lambda: bool(router.submitted))
    await reading.has(num_before)
    first, second = split(router)
    second.script = going_on(ids)
    if is_drained:
        first.drain()
    else:
        first.break_streams()
    await reading.task
    if is_drained:
        first.leave()
        await eventually(lambda: first.has_stream)
    assert reading.token_ids == ids
    assert "budget_restarted" not in reading.events[0].model_dump_json()
    marks = {"budget_restarted": True} if is_restarted else {}
    assert reading.events[-1].usage.model_extra == marks
    request_id = reading.events[0].id
    record = (await router.http.get(f"/v1/requests/{request_id}")).json()
    assert record["moves"] == 1
    assert record["usage"].get("budget_restarted", False) == is_restarted
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        asked = GetRequestRequest(request_id=request_id)
        found = await InferenceStub(channel).GetRequest(asked, timeout=20)
    assert found.usage.budget_restarted == is_restarted
