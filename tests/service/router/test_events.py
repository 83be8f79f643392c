"""Events of a real router on a real Redis: who came, who went, who changed what, and what was not
allowed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.cluster.operate import show_events
from tandem.common.process.cancellation import cancel
from tandem.router.workers.events import EventLog
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


async def told(router: RunningRouter, *kinds: str) -> list[dict[str, Any]]:
    """Waits until there are events of all these kinds, and returns all, the newest first."""
    async with asyncio.timeout(20):
        while True:
            events = (await router.admin.get("/v1/cluster/events")).json()["events"]
            if set(kinds) <= {event["kind"] for event in events}:
                return events
            await asyncio.sleep(0.05)


async def test_what_happens_to_workers_is_told_with_its_time(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = router.workers[0]
    worker.state = "draining"
    await worker.write_record()
    await told(router, "draining")
    refused = await router.admin.post("/v1/cluster/workers/decode-1/drain", json={})
    assert refused.status_code == 409
    events = await told(router, "started", "draining", "refused", "mode")
    worker.state = "ready"
    await worker.write_record()
    assert {e["about"] for e in events if e["kind"] == "started"} == {"decode-0", "decode-1"}
    (drain,) = (e for e in events if e["kind"] == "draining")
    assert drain["about"] == "decode-0"
    (change,) = (e for e in events if e["kind"] == "refused")
    assert "drain of decode-1: ready -> draining, by 127.0.0.1" in change["text"]
    assert "only decode worker" in change["text"]
    assert sorted(events, key=lambda e: e["at"], reverse=True) == events
    await asyncio.to_thread(show_events, str(router.admin.base_url), 50)
    assert "drain of decode-1" in capsys.readouterr().out
    for limit in ("0", "x", "1001"):
        answer = await router.admin.get(f"/v1/cluster/events?limit={limit}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_two_routers_tell_once_of_a_process_and_count_their_own_requests(
    router: RunningRouter,
) -> None:
    """The events are there for a router that starts later."""
    view = router.router.view
    record = next(w.record for w in view.known() if w.record.worker_id == "decode-1")
    logs = [EventLog(view.redis, view.cluster.cluster_id) for _ in range(2)]
    for log in logs:
        log.left(record, in_order=False)
        for _ in range(3):
            log.count("migrated", "decode-1", "migrated after a loss")
    running = [asyncio.create_task(log.run()) for log in logs]
    await told(router, "lost", "migrated")
    await cancel(*running)
    later = EventLog(view.redis, view.cluster.cluster_id)
    events = await later.read(100, router.router._trail)
    assert [e.about for e in events if e.kind == "lost"] == ["decode-1"]
    counted = [e.text for e in events if e.kind == "migrated"]
    assert counted == ["3 requests migrated after a loss"] * 2
