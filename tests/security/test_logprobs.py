"""Cheap requests for very large answers: log probabilities of many prompts, or of many choices.

A worker computes a prompt once, whatever `n` is. Without a limit the router would build the answer
in memory, with more than 400 bytes for each log probability, and be blocked meanwhile.
"""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1 import worker_pb2
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.keyed_routers import Routers, call, ready, routers
from tests.harness.scripted_worker import Say, update

__all__ = ["routers"]
pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [7] * 2000  # the worker's context has 2048 tokens
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_logprobs", {"prompt": [PROMPT] * 128, "prompt_logprobs": 20}),
    ("prompt_logprobs", {"prompt": PROMPT, "n": 128, "prompt_logprobs": 20}),
    ("logprobs", {"prompt": [PROMPT] * 128, "echo": True, "logprobs": 5}),
    ("logprobs", {"prompt": PROMPT, "n": 128, "echo": True, "logprobs": 5, "stream": True}),
    ("logprobs", {"prompt": "x", "n": 128, "logprobs": 5, "max_tokens": 2000}),
    ("logprobs", {**CHAT, "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 900}),
]


async def test_an_answer_too_large_to_make_is_refused_before_it_is_computed(
    routers: Routers,
) -> None:
    url = await routers.start("r1")
    await ready(url)
    for field, body in ATTACKS:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await call(url, path=path, **body)
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (field, "invalid_request")
        assert "may have at most 500000" in error["message"]
    async with grpc.aio.insecure_channel(routers.grpc_address("r1")) as channel:
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), n=128, prompt_logprobs=20)
        with pytest.raises(grpc.aio.AioRpcError, match="may have at most 500000") as refused:
            async for _ in InferenceStub(channel).Generate(asked):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not routers.worker.submitted


async def two_measured_tokens(submit: worker_pb2.SubmitSequence, say: Say) -> None:
    measured = worker_pb2.LogprobEntry(logprob=-1, rank=1, top_ids=[7], top_logprobs=[-1])
    say(update(submit, [1000, 1000], "length", logprobs=[measured] * 2))


async def test_the_bound_is_an_option(routers: Routers) -> None:
    routers.worker.script = two_measured_tokens
    url = await routers.start("r1", logprobs_max=4)
    await ready(url)
    asked = {"prompt": [7], "logprobs": 1}
    assert (await call(url, **asked, max_tokens=2)).status_code == 200
    refused = await call(url, **asked, max_tokens=3)
    assert refused.status_code == 400
    assert (
        "at least 6 log probabilities; one answer may have at most 4, over all prompts and choices"
        in refused.text
    )
