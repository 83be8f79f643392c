from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.router.metrics.timeline import Timeline


@asynccontextmanager
async def turn_after(seconds: float) -> AsyncIterator[None]:
    await asyncio.sleep(seconds)
    yield


async def test_waiting_for_a_turn_is_queue_and_what_follows_is_not() -> None:
    timeline = Timeline()
    async with timeline.queueing(turn_after(0.05)):
        waited = timeline.stages_s["queue"]
        await asyncio.sleep(0.02)
    assert waited >= 0.05
    assert timeline.stages_s["queue"] == waited


async def test_a_refused_turn_is_counted_and_raises() -> None:
    timeline = Timeline()
    with pytest.raises(KeyError):
        async with timeline.queueing(turn_after(0)):
            raise KeyError
    assert set(timeline.stages_s) == {"queue"}


def test_a_workers_part_comes_with_the_first_token_and_the_second() -> None:
    timeline = Timeline()
    with timeline.stage("queue"):
        pass
    timeline.take(pb.SequenceTimings(queue_ms=100, prefill_ms=200), 0)
    assert timeline.stages_s["queue"] == pytest.approx(0.1, abs=0.02)
    assert timeline.stages_s["prefill"] == pytest.approx(0.2)
    second = pb.SequenceTimings(
        queue_ms=100, prefill_ms=200, second_token_ms=50, transfer_exposed_ms=20
    )
    timeline.take(second, 1)
    timeline.take(second, 8)  # of another worker, after a move: not the first tokens
    assert "move" not in timeline.stages_s
    assert timeline.stages_s["transfer_exposed"] == pytest.approx(0.02)
    assert timeline.stages_s["first_decode"] == pytest.approx(0.03)
    assert timeline.stages_s["prefill"] == pytest.approx(0.2)


def test_the_stages_before_the_first_token_leave_no_moment_out() -> None:
    timeline = Timeline()
    time.sleep(0.003)  # before the first stage: it belongs to it
    with timeline.stage("tokenize"):
        time.sleep(0.002)
    for _ in range(2):  # the first submission brings no token
        with timeline.stage("route"):
            time.sleep(0.002)
        timeline.submit()
        time.sleep(0.02)
    timeline.take(pb.SequenceTimings(queue_ms=2, prefill_ms=5), 0)
    timeline.note_tokens(time.monotonic())
    assert set(timeline.stages_s) == {"tokenize", "route", "queue", "prefill", "retry", "wire"}
    assert timeline.stages_s["retry"] >= 0.02
    assert timeline.stages_s["wire"] >= 0.013
    assert sum(timeline.stages_s.values()) == pytest.approx(timeline.ttft_s, rel=1e-6)


def test_a_move_in_midstream_is_a_stage_of_its_own() -> None:
    timeline = Timeline()
    timeline.take(pb.SequenceTimings(queue_ms=100, prefill_ms=200), 0)
    timeline.note_tokens(timeline.began_s + 0.3)
    before = dict(timeline.stages_s)
    with timeline.stage("route"):
        pass
    timeline.take(pb.SequenceTimings(queue_ms=10, prefill_ms=20), 1)
    assert timeline.stages_s.pop("move") == pytest.approx(0.03, abs=0.01)
    assert timeline.stages_s == before


def test_as_a_header() -> None:
    timeline = Timeline()
    timeline.take(pb.SequenceTimings(queue_ms=1.5, prefill_ms=20), 0)
    timeline.note_tokens(timeline.began_s + 0.03)
    header = timeline.server_timing()
    assert header.startswith(
        "queue;dur=1.500, prefill;dur=20.000, wire;dur=8.500, ttft;dur=30.000, total;dur="
    )
