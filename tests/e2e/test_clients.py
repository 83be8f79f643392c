"""The cluster as its users meet it: the openai client, gRPC by reflection, limits and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.conftest import StartCluster
from tests.harness.client import complete, golden, open_client, stream_completion, tokens_of
from tests.harness.cluster import LocalCluster, wait_for

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_openai_client_streams_a_chat_answer(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == [MODEL]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3
    whole = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=30,
    )
    assert whole.choices[0].message.content == text


def test_openai_client_has_log_probabilities(cluster: LocalCluster) -> None:
    """A stream has what a whole answer has."""
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0.5,
        "seed": 3,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 20,
        "frequency_penalty": 0.5,
        "logit_bias": {"28": -100},
        "extra_body": {"repetition_penalty": 1.1, "min_tokens": 4, "bad_words": ["London"]},
    }
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(stream=True, **asked)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content
    assert {len(one.top_logprobs) for one in told.content} == {20}
    assert "".join(one.token for one in told.content).startswith(whole.choices[0].message.content)
    parts = [c.choices[0].logprobs for c in stream if c.choices and c.choices[0].logprobs]
    assert [one for part in parts for one in part.content or ()] == told.content
    scored = client.completions.create(
        model=MODEL, prompt="The capital of France", max_tokens=0, logprobs=1, echo=True
    )
    assert scored.choices[0].text == "The capital of France"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_grpc_client_has_log_probabilities(cluster: LocalCluster) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=golden(0)[0][0]), max_tokens=5, logprobs=2, prompt_logprobs=1
    )
    request.sampling.temperature = 0
    request.sampling.logit_bias[28] = -100.0
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        replies = list(InferenceStub(channel).Generate(request, timeout=60))
    token_ids = [token_id for reply in replies for token_id in reply.token_ids]
    told = [one for reply in replies for one in reply.logprobs]
    assert token_ids == golden(0)[1][0][:5]
    assert [(one.rank, one.top_ids[0], len(one.top_ids)) for one in told] == [
        (1, token_id, 2) for token_id in token_ids
    ]
    assert len(replies[0].prompt_logprobs) == len(golden(0)[0][0]) - 1


async def test_several_prompts_have_the_tokens_that_each_has_alone(cluster: LocalCluster) -> None:
    prompts, expected = golden(0, 1, 2, 3, 4, 5)
    async with open_client(cluster) as client:
        streamed: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        async for event in stream_completion(client, [], prompt=prompts):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
        body = {"prompt": prompts, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        whole = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    assert list(streamed.values()) == expected
    assert [c["token_ids"] for c in whole.json()["choices"]] == expected
    await asyncio.to_thread(cluster.wait_idle)


def test_grpc_client_made_from_reflection_alone(cluster: LocalCluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("tandem.v1.Inference").methods_by_name["Generate"]
        request_class = GetMessageClass(method.input_type)
        reply_class = GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            "/tandem.v1.Inference/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=reply_class.FromString,
        )
        request = request_class(chat={"messages": QUESTION}, max_tokens=30)
        request.sampling.temperature = 0
        replies: list[Any] = list(generate(request, timeout=60))
    assert "Paris" in "".join(r.text for r in replies)
    assert replies[-1].finish_reason in ("stop", "length")
    assert replies[-1].usage.completion_tokens == sum(len(r.token_ids) for r in replies)


def test_stop_strings_end_the_text_before_them(cluster: LocalCluster) -> None:
    body = {"prompt": golden(0)[0][0], "max_tokens": 40, "temperature": 0, "stop": ["answer"]}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"].endswith("The ")
    cluster.wait_idle()


BAD_REQUESTS: dict[str, tuple[bytes | dict[str, Any], int, str]] = {
    "not JSON": (b"{", 400, "JSON"),
    "bad UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8"),
    "wrong type": ({"prompt": "a", "max_tokens": "ten"}, 400, "max_tokens"),
    "unknown model": ({"prompt": "a", "model": "gpt-5"}, 404, "gpt-5"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "prompt too long": ({"prompt": [1] * 9000}, 400, "8192"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "temperature": ({"prompt": "a", "temperature": 2.5}, 400, "temperature"),
    "10 MB body": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "bytes"),
    "penalty": ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
    "bias of no token": ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "too many log probabilities": ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    "never fits": ({"prompt": [5] * 6000, "max_tokens": 2000}, 400, "KV pool"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_http_requests(cluster: LocalCluster, name: str) -> None:
    body, status, says = BAD_REQUESTS[name]
    content: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"content": body}
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{cluster.url}/v1/completions", headers=headers, timeout=60, **content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    cluster.wait_idle()


def test_impossible_role(cluster: LocalCluster) -> None:
    body = {"messages": [{"role": "no role!", "content": "hi"}]}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert "user" in response.json()["error"]["message"]


BAD_CALLS: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "unknown model": (pb.GenerateRequest(text="a", model="x"), grpc.StatusCode.NOT_FOUND, "x"),
    "no prompt": (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "max_tokens 0": (
        pb.GenerateRequest(text="a", max_tokens=0),
        grpc.StatusCode.INVALID_ARGUMENT,
        "max_tokens",
    ),
    "temperature": (
        pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=9)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    "bias of no token": (
        pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias={99999: 1})),
        grpc.StatusCode.INVALID_ARGUMENT,
        "logit_bias",
    ),
    "too many log probabilities": (
        pb.GenerateRequest(text="a", logprobs=21),
        grpc.StatusCode.INVALID_ARGUMENT,
        "logprobs",
    ),
    "prompt too long": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 9000)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "8192",
    ),
    "impossible role": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="no role!", content="hi")])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "user",
    ),
    "never fits": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 6000), max_tokens=2000),
        grpc.StatusCode.INVALID_ARGUMENT,
        "KV pool",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_grpc_requests(cluster: LocalCluster, name: str) -> None:
    request, code, says = BAD_CALLS[name]
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(InferenceStub(channel).Generate(request, timeout=60))
        assert caught.value.code() == code
        assert says in caught.value.details()


def test_bad_utf8_over_grpc(cluster: LocalCluster) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        call = channel.unary_stream("/tandem.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\x12\x01\xff", timeout=30))  # field 2, `text`, one byte
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_what_does_not_fit_now_waits_and_a_full_queue_answers_429(
    start_cluster: StartCluster,
) -> None:
    # Of 170 tokens and those that the first one makes, which takes a while.
    options = ("--num-blocks", "20", "--queue-max", "2", "--transport", "nixl")
    (prompt,), (expected,) = golden(5)
    with start_cluster(*options) as cluster:
        decode = cluster.workers["decode-0"]

        async def tokens(first: int, max_tokens: int) -> list[int]:
            # Another first token: nothing is shared, so two of them do not fit at once.
            async with open_client(cluster) as client:
                asked = stream_completion(client, [first, *prompt[1:]], max_tokens=max_tokens)
                return tokens_of([event async for event in asked])

        running = asyncio.create_task(tokens(prompt[0], 64))
        await asyncio.to_thread(
            wait_for, lambda: decode.state().load.blocks_used, deadline_s=30, what="first"
        )
        waiting = [asyncio.create_task(tokens(first, 8)) for first in (7, 8)]
        await asyncio.to_thread(
            wait_for, lambda: decode.state().load.num_waiting == 2, deadline_s=30, what="queue"
        )
        async with open_client(cluster) as client:
            body = {"prompt": [9, *prompt[1:]], "max_tokens": 8}
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429, refused.text
            assert float(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "queue_full"
            assert await running == expected
            assert [len(t) for t in await asyncio.gather(*waiting)] == [8, 8]
            assert (await complete(client, prompt, max_tokens=4)).token_ids == expected[:4]
        await asyncio.to_thread(cluster.wait_idle)
