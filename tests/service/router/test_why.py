"""A request's record sums its stages to TTFT, and `tandem why` prints them with the placement."""

from __future__ import annotations

import asyncio

import pytest

from tandem.cluster.operate import show_why
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.router.metrics.timeline import TTFT_STAGES
from tests.harness.scripted_worker import Say, refusing, update
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


async def slow(submit: pb.SubmitSequence, say: Say) -> None:
    await asyncio.sleep(0.05)
    timings = pb.SequenceTimings(queue_ms=10, shared_wait_ms=7.5, prefill_ms=20, transport="local")
    say(update(submit, [5], "length", timings=timings))


async def test_the_stages_of_a_request_sum_to_its_ttft(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.script(slow)
    router.workers[0].script = refusing("queue_full")
    seen = set()
    for number in range(6):
        headers = {"x-request-id": f"why-{number}"}
        body = {"prompt": "x", "max_tokens": 1}
        answer = await router.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        listed = (await router.http.get(f"/v1/requests/why-{number}")).json()
        (record,) = listed["data"]
        stages = record["stages_ms"]
        seen |= set(stages)
        before = sum(stages.get(name, 0.0) for name in TTFT_STAGES)
        assert before == pytest.approx(record["ttft_ms"], rel=0.02)
        assert record["shared_wait_ms"] == 7.5
    assert {"tokenize", "route", "queue", "prefill", "retry", "wire"} <= seen
    await asyncio.to_thread(show_why, str(router.http.base_url), "why-5")
    told = capsys.readouterr().out
    assert "time to first token" in told
    assert "100%" in told
    assert "placed: load" in told
    assert record["placement_sentence"] in " ".join(told.split())
    assert "decoded by decode-1" in told
    assert (
        "7.5 ms of the queue time: the request waited for KV blocks that other requests computed"
        in told
    )
