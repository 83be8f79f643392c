"""Cached tokens by tier, in the answers of every API, in a request's record and in metrics."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from tandem.common.cached_tokens import CachedTokens
from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

BY_TIER = msgspec.structs.asdict(CachedTokens(device=16, host=32, disk=32, store=16))
MESSAGES = [{"role": "user", "content": "Hello!"}]


def say(router: RunningRouter, *, with_tiers: bool) -> None:
    told = {"cached_by_tier": pb.CachedTokens(**BY_TIER)} if with_tiers else {}
    router.script(saying(router.tokenizer.encode("one two three"), cached_tokens=96, **told))


async def usage_of(router: RunningRouter, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await router.http.post(path, json={"model": "tiny", "max_tokens": 3, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return dict(answer.json()["usage"])
    found: dict[str, Any] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            found |= event.get("usage") or event.get("response", {}).get("usage") or {}
    return found


@pytest.mark.parametrize("with_tiers", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_api_tells_them_where_a_tier_exists(
    router: RunningRouter, stream: bool, with_tiers: bool
) -> None:
    say(router, with_tiers=with_tiers)
    details = {"cached_tokens": 96} | ({"cached_tokens_by_tier": BY_TIER} if with_tiers else {})
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, **options}),
        ("/v1/completions", {"prompt": "Hello!", **options}),
    ):
        usage = await usage_of(router, path, body)
        assert usage["prompt_tokens_details"] == details
    response = {"input": "Hello!", "stream": stream, "max_output_tokens": 16}
    usage = await usage_of(router, "/v1/responses", response)
    assert usage["input_tokens_details"] == {**details, "cache_write_tokens": 0}
    usage = await usage_of(router, "/v1/messages", {"messages": MESSAGES, "stream": stream})
    assert usage["cache_read_input_tokens"] == 96
    assert usage.get("cache_read_input_tokens_by_tier") == (BY_TIER if with_tiers else None)


async def test_several_prompts_are_summed(router: RunningRouter) -> None:
    say(router, with_tiers=True)
    usage = await usage_of(router, "/v1/completions", {"prompt": ["a", "b"]})
    summed = {tier: 2 * num_tokens for tier, num_tokens in BY_TIER.items()}
    expected = {"cached_tokens": 192, "cached_tokens_by_tier": summed}
    assert usage["prompt_tokens_details"] == expected


async def test_grpc_the_record_and_metrics_tell_them(router: RunningRouter) -> None:
    say(router, with_tiers=True)
    before = await counted(router)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        stub = InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="Hello!", max_tokens=3)
        messages = [message async for message in stub.Generate(request, timeout=20)]
        asked = inference_pb2.GetRequestRequest(request_id=messages[0].request_id)
        record = await stub.GetRequest(asked, timeout=20)
    for usage in (messages[-1].usage, record.usage):
        assert usage.cached_tokens == 96
        assert usage.cached_tokens_by_tier == inference_pb2.CachedTokensByTier(**BY_TIER)
    after = await counted(router)
    assert {tier: after[tier] - before.get(tier, 0) for tier in BY_TIER} == BY_TIER


async def counted(router: RunningRouter) -> dict[str, float]:
    """Returns the router's counter by tier."""
    name = "tandem_prompt_tokens_cached_by_tier_total"
    rows = (await router.admin.get("/metrics")).text.splitlines()
    rows = [row for row in rows if row.startswith(f"{name}{{")]
    return {row.split('"')[1]: float(row.rpartition(" ")[2]) for row in rows}
