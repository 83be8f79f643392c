"""The feed of the operators' page: what it tells, what changed, and its bounds."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.api.admin import page_feed
from tandem.api.admin.page_feed import Viewer
from tandem.api.admin.snapshot import WORKER_COLUMNS
from tandem.common.process.cancellation import cancel
from tandem.common.worker_load import TierUse
from tandem.errors import QueueFull
from tandem.net.security.access import Access
from tandem.net.security.key_ring import KeyRing
from tandem.net.store.cluster_event import ClusterEvent
from tandem.router.autoscaler.policy import ScalingDecision
from tandem.router.metrics.router import WorkerGauges
from tandem.router.metrics.timeline import Timeline
from tandem.router.request.log import RequestRecord
from tests.harness.page_server import SimulatedRouter

pytestmark = pytest.mark.asyncio

NOW = 1_000_000.0


@pytest.fixture
def fed(tmp_path: Path) -> SimulatedRouter:
    return SimulatedRouter(tmp_path)


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    kind, data = event.decode().rstrip("\n").split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_of(viewer: Viewer) -> tuple[str, dict[str, Any]]:
    return parsed(await asyncio.wait_for(viewer.next(), 5))


async def test_a_viewer_gets_all_and_then_only_what_changed(fed: SimulatedRouter) -> None:
    fed.put("prefill-0", num_leases=2, num_ranks=4)
    fed.put("prefill-1")
    fed.feed.sample(NOW)
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        kind, full = await next_of(viewer)
        assert kind == "full"
        assert full["worker_columns"] == list(WORKER_COLUMNS)
        told = dict(zip(WORKER_COLUMNS, full["workers"]["prefill-0"], strict=True))
        assert (told["state"], told["leases"], told["address"]) == ("ready", 2, "10.0.0.1:5000")
        assert told["ranks"] == 4
        assert full["head"]["headline"].startswith("All is well")
        assert len(full["samples"]) == 1
        assert len(full["samples"][0]) == len(full["sample_columns"])
        await fed.feed.look(NOW + 1)
        assert await next_of(viewer) == ("delta", {"now": NOW + 1})
        fed.put("prefill-0", num_leases=3, blocks_used=50)
        del fed.view._workers["prefill-1"]
        fed.feed.sample(NOW + 2)
        fed.metrics.flows.note_pull("prefill-0", "decode-0", 7)
        await fed.feed.look(NOW + 2)
        _, changed = await next_of(viewer)
        assert list(changed["workers"]) == ["prefill-0"]
        told = dict(zip(WORKER_COLUMNS, changed["workers"]["prefill-0"], strict=True))
        assert (told["leases"], told["kv_used_percent"]) == (3, 50)
        assert changed["gone"] == ["prefill-1"]
        assert changed["flows"] == [["pull", "prefill-0", "decode-0", 7]]
        assert len(changed["samples"]) == 1


async def test_what_a_worker_keeps_below_its_pool_is_in_its_row_and_in_the_samples(
    fed: SimulatedRouter,
) -> None:
    store = TierUse("store", 65_536, 7)
    fed.put("prefill-0", TierUse("host", 100, 50), store)
    fed.put("decode-0", TierUse("host", 300, 50), blocks_used=20)
    fed.put("decode-1")
    fed.feed.sample(NOW)
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        full = (await next_of(viewer))[1]
        rows = {
            n: dict(zip(WORKER_COLUMNS, row, strict=True)) for n, row in full["workers"].items()
        }
        assert rows["prefill-0"]["tiers"] == [["host", 50, 100], ["store", 7, 65_536]]
        assert rows["decode-1"]["tiers"] == []
        sample = dict(zip(full["sample_columns"], full["samples"][-1], strict=True))
        assert (sample["kv_host_share"], sample["kv_disk_share"]) == (0.25, None)
        assert (sample["kv_store_share"], sample["kv_used_share"]) == (0.0001, 0.0667)
        fed.put("prefill-0", TierUse("host", 100, 51), store)
        await fed.feed.look(NOW + 1)
        changed = (await next_of(viewer))[1]["workers"]
        assert list(changed) == ["prefill-0"]
        assert changed["prefill-0"][WORKER_COLUMNS.index("tiers")][0] == ["host", 51, 100]


async def test_the_charts_end_with_the_step_that_has_not_ended(fed: SimulatedRouter) -> None:
    """Otherwise a tile has a value that its chart shows up to 5 s later, or never."""
    fed.put("decode-0", num_running=2)
    fed.metrics.on_first_token(3.0, 2.0)
    fed.feed.sample(NOW)
    fed.metrics.on_first_token(11.8, 2.0)
    fed.put("decode-0", num_running=5, num_prefilling=1, num_waiting=1, num_pulls=2)
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW + 1)
        full = (await next_of(viewer))[1]
        names = ("decoding", "in_prefill", "queued", "ttft_p50_ms", "ttft_max_ms")
        assert [full["step"][name] for name in names] == [4, 3, 1, 11_800, 11_800]
        assert [full["figures"][name] for name in names] == [4, 3, 1, 3000, 11_800]
        assert set(full["step"]) <= set(full["sample_columns"])
        fed.feed.sample(NOW + 2)
        await fed.feed.look(NOW + 2)
        changed = (await next_of(viewer))[1]
        assert changed["step"]["ttft_max_ms"] is None
        assert "figures" not in changed


async def test_tiles_and_charts_sum_over_the_same_workers(fed: SimulatedRouter) -> None:
    """One that drains still has requests; the record of a killed one remains for some seconds."""
    for name in ("decode-0", "decode-1", "prefill-0"):
        fed.put(name, num_running=1)
    _change(fed, "decode-0", state="draining")
    agent = {"id": "prefill-0", "state": "restarting", "since": NOW - 1}
    owned = {"prefill": {"wanted": 1, "running": 0, "agents": [agent]}}

    async def pools() -> dict[str, Any]:
        return owned

    fed.control.sizes.pools = pools  # type: ignore[method-assign]
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        fed.feed.sample(NOW + 1)
        await fed.feed.look(NOW + 1)
        full = (await next_of(viewer))[1]
        sample = dict(zip(full["sample_columns"], full["samples"][-1], strict=True))
        assert sample["decoding"] == full["figures"]["decoding"] == 2


async def test_the_tile_the_boxes_and_the_words_have_the_same_requests(
    fed: SimulatedRouter,
) -> None:
    """A request counts once: at its decode worker, or in the router before a worker has it."""
    fed.put("decode-0", num_running=5, num_prefilling=2, num_waiting=1, num_pulls=4)
    fed.put("decode-1", num_running=3, num_pulls=1)
    fed.put("prefill-0", num_waiting=3, num_leases=5)  # the prompts of the five pulls
    now = time.time()
    fed.generator.requests.open(RequestRecord("r1", "chat", Timeline(), created=now - 9))
    ended = RequestRecord("r2", "chat", Timeline())
    fed.generator.requests.open(ended)
    ended.outcome = "stop"
    ended.end()
    with fed.feed.viewing() as viewer:
        await fed.feed.look(now)
        full = (await next_of(viewer))[1]
    names = ("decoding", "in_prefill", "queued")
    figures = [full["figures"][name] for name in names]
    assert figures == [6, 7, 2], "15 open requests: 14 at workers, and 1 in the router"
    columns = [WORKER_COLUMNS.index(name) for name in names]
    rows = full["workers"]
    boxes = [sum(rows[f"decode-{n}"][column] for n in range(2)) for column in columns]
    assert boxes == [6, 7, 1], "the tile without the router's request"
    assert full["answers"]["slow"].startswith(
        "9 requests are in prefill or queued now; the longest wait for a first token is 9 s."
    )
    phases = {request["id"]: request["phase"] for request in full["requests"]}
    assert phases == {"r1": "router", "r2": ""}


def _change(fed: SimulatedRouter, worker_id: str, **changes: Any) -> None:
    worker = fed.view._workers[worker_id]
    worker.record = msgspec.structs.replace(worker.record, **changes)


async def test_a_request_is_told_again_when_it_has_changed(fed: SimulatedRouter) -> None:
    record = RequestRecord("r1", "chat", Timeline(), tenant="secret-tenant", client_id="mine")
    fed.generator.requests.open(record)
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        event = await viewer.next()
        assert b"secret-tenant" not in event
        ((running),) = parsed(event)[1]["requests"]
        assert (running["id"], running["outcome"]) == ("r1", "running")
        record.fail(QueueFull("full"))
        record.end()
        await fed.feed.look(NOW + 1)
        (ended,) = (await next_of(viewer))[1]["requests"]
        assert (ended["outcome"], ended["error"], ended["stages_ms"]) == ("queue_full", "full", {})


async def test_all_viewers_share_one_snapshot_and_one_encoding(
    fed: SimulatedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    encoded = []
    take_snapshot = page_feed.take_snapshot
    event = page_feed.sse.event
    monkeypatch.setattr(
        page_feed, "take_snapshot", lambda *a, **k: taken.append(1) or take_snapshot(*a, **k)
    )
    monkeypatch.setattr(page_feed.sse, "event", lambda *a: encoded.append(a[1]) or event(*a))
    with fed.feed.viewing() as first, fed.feed.viewing() as second:
        await fed.feed.look(NOW)
        assert await first.next() is await second.next()
        await fed.feed.look(NOW + 1)
        assert await first.next() is await second.next()
    assert (len(taken), encoded) == (2, ["full", "delta"])


async def test_a_slow_viewer_keeps_few_events_and_gets_all_anew(fed: SimulatedRouter) -> None:
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        assert (await next_of(viewer))[0] == "full"
        for n in range(page_feed.PENDING_MAX):
            await fed.feed.look(NOW + n)
        assert len(viewer._pending) == page_feed.PENDING_MAX
        for n in range(100):
            await fed.feed.look(NOW + 10 + n)
            assert len(viewer._pending) <= page_feed.PENDING_MAX
        kind, told = await next_of(viewer)
        assert (kind, told["now"]) == ("full", NOW + 109)
        await fed.feed.look(NOW + 110)
        assert (await next_of(viewer))[0] == "delta"


async def test_viewers_are_bounded_and_leave_their_place(fed: SimulatedRouter) -> None:
    places = [fed.feed.viewing() for _ in range(page_feed.VIEWERS_MAX)]
    for place in places:
        place.__enter__()
    with pytest.raises(QueueFull, match="is already open"):
        page_feed.LiveStream(fed.feed)
    places[0].__exit__(None, None, None)
    page_feed.LiveStream(fed.feed)
    assert len(fed.feed._viewers) == page_feed.VIEWERS_MAX - 1


async def test_nothing_is_looked_at_while_nobody_looks(
    fed: SimulatedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "INTERVAL_S", 0.01)
    looks = 0
    look = fed.feed.look

    async def counted(now: float) -> None:
        nonlocal looks
        looks += 1
        await look(now)

    monkeypatch.setattr(fed.feed, "look", counted)
    running = asyncio.create_task(fed.feed.run())
    await asyncio.sleep(0.05)
    assert looks == 0
    with fed.feed.viewing() as viewer:
        assert (await next_of(viewer))[0] == "full"
        assert (await next_of(viewer))[0] == "delta"
        # The second one need not wait for the next look.
        with fed.feed.viewing() as other:
            assert (await next_of(other))[0] == "full"
    await asyncio.sleep(0.1)
    seen = looks
    await asyncio.sleep(0.1)
    assert looks == seen
    with fed.feed.viewing() as viewer:
        assert (await next_of(viewer))[0] == "full"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await viewer.next() == b""  # the streams end with the feed


async def test_a_bug_of_the_page_does_not_end_the_router(
    fed: SimulatedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "INTERVAL_S", 0.01)
    monkeypatch.setattr(page_feed, "_AFTER_BUG_S", 0.01)
    look = fed.feed.look
    broken = [True]

    async def breaking(now: float) -> None:
        if broken.pop() if broken else False:
            raise RuntimeError("a bug")
        await look(now)

    monkeypatch.setattr(fed.feed, "look", breaking)
    running = asyncio.create_task(fed.feed.run())
    with fed.feed.viewing() as viewer:
        assert (await next_of(viewer))[0] == "full"
    running.cancel()


async def test_an_event_that_cannot_be_read_stops_no_later_ones(
    fed: SimulatedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of two versions write them during an upgrade."""
    event = ClusterEvent(NOW, "started", "decode-0", "a text")
    reads = [0]

    async def read(*_: object) -> list[ClusterEvent]:
        reads[0] += 1
        if reads[0] == 1:
            raise msgspec.ValidationError("Object missing required field `at`")
        return [event]

    monkeypatch.setattr(fed.view.events, "read", read)
    monkeypatch.setattr(page_feed, "_AFTER_BUG_S", 0.01)
    monkeypatch.setattr(page_feed, "_EVENTS_EVERY_S", 0.01)
    monkeypatch.setattr(page_feed, "INTERVAL_S", 0.01)
    running = asyncio.create_task(fed.feed.run())
    try:
        with fed.feed.viewing() as viewer:
            async with asyncio.timeout(20):
                while not (await next_of(viewer))[1].get("events"):
                    pass
    finally:
        await cancel(running)
    assert reads[0] > 1


async def test_the_events_are_json_on_one_line() -> None:
    event = page_feed.sse.event({"text": "a\nb"}, "full")
    assert event == b'event: full\ndata: {"text":"a\\nb"}\n\n'
    assert msgspec.json.decode(event.split(b"data: ")[1]) == {"text": "a\nb"}


async def test_a_pod_that_never_starts_is_on_the_page_and_among_the_events(
    fed: SimulatedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(fed.view.events, "add", lambda *what, once: told.append(what))
    fed.put("decode-0")
    watch = fed.view.pool_watch
    watch.grace_s = 0.0
    watch.owned = {"decode": {"wanted": 2, "running": 2}}
    for _ in range(2):
        fed.view._problems_noted_at = 0.0
        fed.view._note_problems()
    text = "the decode pool has 1 of 2 workers ready; "
    text += "`kubectl get pods` shows what the others wait for"
    assert told == [("problem", "decode pool", text)]
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        head = (await next_of(viewer))[1]["head"]
        assert head["headline"].startswith(f"T{text[1:]}. Requests are served")
        assert not head["is_well"]
        assert head["pools"]["decode"] == {"wanted": 2, "running": 2, "ready": 1, "others": {}}
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in WorkerGauges(fed.view).collect()
        for sample in family.samples
    }
    assert metrics["tandem_pool_size", "decode"] == 2
    assert metrics["tandem_pool_workers_ready", "decode"] == 1


async def test_the_autoscalers_mode_and_reasons_are_told(fed: SimulatedRouter) -> None:
    fed.view.decisions = [ScalingDecision("decode", 1, 3, 3, "queue", "3 workers are wanted")]
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        head = (await next_of(viewer))[1]["head"]
    assert head["autoscale"] == {
        "mode": "off",
        "decisions": [{"pool": "decode", "size": 3, "why": "3 workers are wanted"}],
    }


async def test_the_page_knows_whether_a_client_needs_a_key(fed: SimulatedRouter) -> None:
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        assert (await next_of(viewer))[1]["head"]["public"]["needs_key"] is False
        key: Any = object()
        fed.access._ring._records["k1"] = key
        await fed.feed.look(NOW + 1)
        assert (await next_of(viewer))[1]["head"]["public"]["needs_key"] is True
    assert Access(KeyRing(), is_loopback=False).needs_key
    assert not Access(KeyRing(), is_loopback=False, allows_anonymous=True).needs_key


async def test_the_answers_are_sent_once_until_one_changes(fed: SimulatedRouter) -> None:
    fed.put("decode-0", blocks_used=50)
    with fed.feed.viewing() as viewer:
        await fed.feed.look(NOW)
        answers = (await next_of(viewer))[1]["answers"]
        assert answers["kv"].startswith("50% is in use by open requests")
        await fed.feed.look(NOW + 1)
        assert "answers" not in (await next_of(viewer))[1]
        fed.put("decode-0", blocks_used=60)
        await fed.feed.look(NOW + 2)
        assert (await next_of(viewer))[1]["answers"]["kv"].startswith("60% is in use")
