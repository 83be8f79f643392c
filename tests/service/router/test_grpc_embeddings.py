"""Embeddings over gRPC: what HTTP answers, refusals, and what a client leaves that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tandem.client import InferenceStub
from tandem.client import inference as pb
from tests.harness.scripted_worker import saying, silent
from tests.service.router.conftest import RunningRouter, eventually
from tests.service.router.test_embeddings import embeds, size

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def stub(router: RunningRouter) -> AsyncIterator[InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        yield InferenceStub(channel)


def inputs(*given: str | list[int]) -> list[pb.EmbedInput]:
    return [
        pb.EmbedInput(text=one)
        if isinstance(one, str)
        else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in given
    ]


async def read(call: Any) -> list[pb.EmbedResponse]:
    return [message async for message in call]


async def test_embeddings_are_those_of_http(router: RunningRouter, stub: InferenceStub) -> None:
    embeds(router)
    texts: list[str | list[int]] = ["one", "one two", "one two three"]
    http = await router.openai.embeddings.create(model="tiny", input=texts)  # type: ignore[arg-type]
    asked = pb.EmbedRequest(model="tiny", input=inputs(*texts), dimensions=size(router))
    call = stub.Embed(asked, timeout=20, metadata=(("x-request-id", "mine"),))
    messages = await read(call)
    assert [list(message.embedding) for message in messages] == [
        pytest.approx(one.embedding, abs=1e-7) for one in http.data
    ]
    assert [message.index for message in messages] == [0, 1, 2]
    assert [message.HasField("usage") for message in messages] == [False, False, True]
    assert messages[-1].usage.prompt_tokens == http.usage.prompt_tokens
    assert messages[-1].usage.cached_tokens == 3
    for message in messages:
        found = pb.GetRequestRequest(request_id=message.request_id)
        record = await stub.GetRequest(found, timeout=20)
        assert (record.kind, record.client_request_id) == ("embedding", "mine")
    assert len({message.request_id for message in messages}) == 3
    as_ids = inputs(*map(router.tokenizer.encode, map(str, texts)))
    again = await read(stub.Embed(pb.EmbedRequest(input=as_ids), timeout=20))
    assert [m.embedding for m in again] == [m.embedding for m in messages]


async def test_more_inputs_than_go_at_once(router: RunningRouter, stub: InferenceStub) -> None:
    embeds(router)
    asked = pb.EmbedRequest(input=inputs(*([number] for number in range(100, 400))))
    messages = await read(stub.Embed(asked, timeout=60))
    told = [message.embedding[0] / message.embedding[1] for message in messages]
    assert told == pytest.approx(list(range(100, 400)), rel=1e-4)
    assert messages[-1].usage.prompt_tokens == 300
    assert router.num_running() == 0


BAD = [
    (pb.EmbedRequest(), "input must be a list of 1 to 2048"),
    (pb.EmbedRequest(input=inputs(*["a"] * 2049)), "input must be a list of 1 to 2048"),
    (pb.EmbedRequest(input=[pb.EmbedInput()]), "input must be a non-empty string"),
    (pb.EmbedRequest(input=[*inputs("a"), pb.EmbedInput()]), "input 1 (from 0): input must be"),
    (pb.EmbedRequest(input=inputs("a", "")), "input 1 (from 0): input must be"),
    (pb.EmbedRequest(input=inputs([])), "input must be a non-empty string"),
    (pb.EmbedRequest(input=inputs([1], [10**9])), "input 1 (from 0): input has the token id"),
    (pb.EmbedRequest(input=inputs([5] * 3000)), "maximum context length is 2048 tokens"),
    (pb.EmbedRequest(input=inputs("a"), dimensions=7), "dimensions must be"),
    (pb.EmbedRequest(input=inputs("a"), truncate_prompt_tokens=0), "truncate_prompt_tokens must"),
]


@pytest.mark.parametrize(("request_", "says"), BAD)
async def test_each_refusal_names_the_field(
    router: RunningRouter, stub: InferenceStub, request_: pb.EmbedRequest, says: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(stub.Embed(request_, timeout=20))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert says in raised.value.details()  # type: ignore[operator]
    assert not router.submitted
    assert router.num_running() == 0


async def test_other_refusals_have_their_codes(router: RunningRouter, stub: InferenceStub) -> None:
    asked = pb.EmbedRequest(input=inputs("a"))
    other = pb.EmbedRequest(input=inputs("a"), model="other")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(stub.Embed(other, timeout=20))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert not router.submitted
    # A worker of an older version takes it for a completion.
    router.script(saying([5]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(stub.Embed(asked, timeout=20))
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert dict(raised.value.trailing_metadata())["tandem-code"] == "incompatible"


@pytest.mark.parametrize("body", [b"\x0a\x02\xff\xfe", b"\x12\x7fx", b"\xff"])
async def test_bytes_that_are_no_message(router: RunningRouter, body: bytes) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        call = channel.unary_stream("/tandem.v1.Inference/Embed")(body, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read(call)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in raised.value.details()  # type: ignore[operator]


async def test_fields_reach_the_workers(router: RunningRouter, stub: InferenceStub) -> None:
    embeds(router)
    asked = pb.EmbedRequest(
        input=inputs(list(range(5, 35))), truncate_prompt_tokens=10, add_special_tokens=False
    )
    (message,) = await read(stub.Embed(asked, timeout=20))
    assert message.usage.prompt_tokens == 10
    (submitted,) = router.submitted
    assert list(submitted.input.token_ids) == list(range(25, 35))  # type: ignore[attr-defined]
    assert submitted.input.embed  # type: ignore[attr-defined]


async def test_a_client_that_goes_leaves_nothing(
    router: RunningRouter, stub: InferenceStub
) -> None:
    router.script(silent)
    call = stub.Embed(pb.EmbedRequest(input=inputs("a", "b", "c")))
    reading = asyncio.create_task(read(call))
    await eventually(lambda: len(router.submitted) == 3)
    call.cancel()
    await asyncio.wait([reading])
    await eventually(lambda: len(router.cancelled) == 3)
    await eventually(lambda: router.num_running() == 0)
