"""`tandem.v1.Inference` by its generated stub, and by reflection alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.scripted_worker import refusing, saying, silent
from tests.service.router.conftest import BODY_BYTES_MAX, RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

SERVICE = "tandem.v1.Inference"


@pytest_asyncio.fixture(loop_scope="module")
async def channel(router: RunningRouter) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        yield channel


async def read(call: Any) -> list[Any]:
    return [message async for message in call]


async def test_generate_streams_text_and_token_ids(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    output_token_ids = router.tokenizer.encode("Grüße 🙂")
    router.script(saying(output_token_ids, cached_tokens=16))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello!")])
    request = pb.GenerateRequest(
        chat=chat,
        max_tokens=len(output_token_ids),
        sampling=pb.SamplingParams(seed=3, temperature=0),
    )
    messages = await read(InferenceStub(channel).Generate(request, timeout=20))
    assert "".join(m.text for m in messages) == "Grüße 🙂"
    assert [i for m in messages for i in m.token_ids] == output_token_ids
    assert messages[0].prompt_tokens == messages[-1].usage.prompt_tokens > 0
    assert messages[-1].finish_reason == "length"
    assert messages[-1].usage.completion_tokens == len(output_token_ids)
    assert messages[-1].usage.cached_tokens == 16
    assert router.submitted[0].input.sampling.seed == 3


async def test_by_reflection_alone(router: RunningRouter, channel: grpc.aio.Channel) -> None:
    router.script(saying(router.tokenizer.encode("found you")))
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest
    questions = iter([ask(list_services=""), ask(file_containing_symbol=SERVICE)])
    listed, file = await read(reflect(questions, timeout=20))
    names = {s.name for s in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    pool = descriptor_pool.DescriptorPool()
    for content in file.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(content))
    method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
    request_type = message_factory.GetMessageClass(method.input_type)
    generate = channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=request_type.SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    messages = await read(generate(request_type(text="where?", max_tokens=2), timeout=20))
    assert "".join(m.text for m in messages) == "found you"


async def test_models_and_health(channel: grpc.aio.Channel) -> None:
    listed = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)
    assert [(m.id, m.max_model_len) for m in listed.models] == [("tiny", 2048)]
    check = health_pb2_grpc.HealthStub(channel).Check
    answer = await check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


BAD = [
    (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "non-empty"),
    (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "'tiny'"),
    (pb.GenerateRequest(text="x", max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "at least 1"),
    (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=3)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "from 0 (greedy) to 2",
    ),
    (
        pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))),
        grpc.StatusCode.INVALID_ARGUMENT,
        "from 0 (greedy) to 2",
    ),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70000])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "0 to 49151",
    ),
    (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="a wizard", content="x")])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "system, user, assistant",
    ),
    (pb.GenerateRequest(chat=pb.Chat()), grpc.StatusCode.INVALID_ARGUMENT, "messages"),
    (pb.GenerateRequest(text="x " * 4000), grpc.StatusCode.INVALID_ARGUMENT, "at most 2047"),
    (
        pb.GenerateRequest(text="x", stop=["a"] * 257),
        grpc.StatusCode.INVALID_ARGUMENT,
        "at most 256",
    ),
]


@pytest.mark.parametrize(("request_", "code", "says"), BAD)
async def test_bad_requests(
    router: RunningRouter,
    channel: grpc.aio.Channel,
    request_: pb.GenerateRequest,
    code: grpc.StatusCode,
    says: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(InferenceStub(channel).Generate(request_, timeout=20))
    assert raised.value.code() == code
    assert says in raised.value.details()
    assert not router.submitted


@pytest.mark.parametrize("body", [b"\x12\x02\xff\xfe", b"\x12\x7fx", b"\xff"])
async def test_bytes_that_are_no_message(channel: grpc.aio.Channel, body: bytes) -> None:
    """Invalid UTF-8 in a string field, a truncated field, a broken tag."""
    call = channel.unary_stream(f"/{SERVICE}/Generate")(body, timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(call)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in raised.value.details()


async def test_too_large_a_message(channel: grpc.aio.Channel) -> None:
    request = pb.GenerateRequest(text="x" * BODY_BYTES_MAX)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(InferenceStub(channel).Generate(request, timeout=20))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_placement_is_explained_on_request(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    router.script(saying([1000]))
    request = pb.GenerateRequest(text="x", max_tokens=1)
    lines = []
    for metadata in ((("x-tandem-placement", "1"),), ()):
        call = InferenceStub(channel).Generate(request, timeout=20, metadata=metadata)
        await read(call)
        lines.append(dict(await call.initial_metadata()).get("x-tandem-placement"))
    assert lines[0].startswith("load: decode=decode-")
    assert lines[1] is None


async def test_stages_come_in_a_trailer_and_are_kept(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    router.script(saying([1000, 1001]))
    stub = InferenceStub(channel)
    request = pb.GenerateRequest(text="x", max_tokens=2)
    metadata = (("x-tandem-timing", "1"), ("x-request-id", "a-clients-own"))
    call = stub.Generate(request, timeout=20, metadata=metadata)
    messages = await read(call)
    timing = dict(await call.trailing_metadata())["server-timing"]
    assert timing.startswith("tokenize;dur=")
    asked = pb.GetRequestRequest(request_id=messages[0].request_id)
    kept = await stub.GetRequest(asked, timeout=20)
    assert (kept.request_id, kept.outcome) == (asked.request_id, "length")
    assert kept.usage.completion_tokens == 2
    assert {"tokenize", "route", "queue"} <= set(kept.stages_ms)
    assert kept.placement_sentence.endswith(".")
    assert kept.HasField("ttft_ms")
    named = await stub.GetRequest(pb.GetRequestRequest(request_id="a-clients-own"), timeout=20)
    assert named.request_id == asked.request_id
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetRequest(pb.GetRequestRequest(request_id="nobody"), timeout=20)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_full_queues_say_when_to_retry(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    router.script(refusing("queue_full", retry_after_s=4))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(InferenceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=20))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(raised.value.trailing_metadata())["retry-after"] == "4"


async def test_cancelled_call_cancels_at_the_worker(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    router.script(silent)
    call = InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
    reading = asyncio.create_task(read(call))
    await eventually(lambda: bool(router.submitted))
    call.cancel()
    await asyncio.wait([reading])
    await eventually(lambda: len(router.cancelled) == 1)
