"""Requests that are to be kept: what their workers are told, and what their records say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.cluster.operate import show_why
from tandem.net.rpc.tandem.v1 import inference_pb2
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.harness.models import HERMES_TEMPLATE, with_template
from tests.harness.scripted_worker import saying
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

EOS = 2
MESSAGES = [{"role": "user", "content": "How is the weather in Paris? " * 8}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another chat template."""
    return with_template(tmp_path_factory.mktemp("model") / "tiny", HERMES_TEMPLATE)


async def ask(
    router: RunningRouter, said: str, headers: dict[str, str] | None = None, **body: Any
) -> tuple[pb.SequenceInput, str]:
    """Returns the input that a worker got, and the request's id."""
    for worker in router.workers:
        worker.submitted.clear()
        worker.kept.clear()
    ids = [*router.tokenizer.encode(said, add_special_tokens=False), EOS]
    router.script(saying(ids, finish_reason="stop"))
    answer = await router.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, **body}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    (submitted,) = [s for worker in router.workers for s in worker.submitted]
    return submitted.input, answer.json()["id"]


async def kept(router: RunningRouter) -> pb.KeepRequest:
    await eventually(lambda: any(worker.kept for worker in router.workers), deadline_s=30)
    (request,) = [k for worker in router.workers for k in worker.kept]
    return request


async def kept_of(router: RunningRouter, request_id: str) -> dict[str, Any]:
    """Returns what the record says once the worker has answered."""
    record = router.router.generator.requests.find(request_id)
    await eventually(lambda: record.kept["tokens"] or record.kept["why_not"], deadline_s=30)
    told: dict[str, Any] = (await router.http.get(f"/v1/requests/{request_id}")).json()["kept"]
    return told


async def test_a_request_without_wishes_is_not_kept(router: RunningRouter) -> None:
    given, request_id = await ask(router, "Fine.")
    assert not given.retention.returns
    assert given.retention.pin_s == 0
    record = (await router.http.get(f"/v1/requests/{request_id}")).json()
    assert record["kept"] is None
    assert not any(worker.kept for worker in router.workers)


@pytest.mark.parametrize("header", ["x-session-id", "X-Correlation-ID"])
async def test_a_session_is_likely_to_return(router: RunningRouter, header: str) -> None:
    given, _ = await ask(router, "Fine.", {header: "chat 7"})
    assert given.retention.returns
    assert given.retention.pin_s == 0


async def test_a_wrong_session_is_refused(router: RunningRouter) -> None:
    answer = await router.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES}, headers={"x-session-id": "x" * 300}
    )
    assert answer.status_code == 400
    assert "x-session-id must have 1 to 256 printable" in answer.json()["error"]["message"]


async def test_a_retention_pins_the_prompt_and_the_answer(router: RunningRouter) -> None:
    given, request_id = await ask(
        router, "It rains. " * 9, prompt_cache_retention="24h", kv_priority=80
    )
    assert (given.retention.returns, given.retention.pin_s) == (True, 86_400)
    assert given.retention.priority == 80
    asked = await kept(router)
    num_tokens = len(given.token_ids) + len(router.tokenizer.encode("It rains. " * 9)) + 1
    assert len(asked.block_hashes) == (num_tokens - 1) // 16 > len(given.token_ids) // 16
    assert asked.retention.pin_s == 86_400
    told = await kept_of(router, request_id)
    assert told["tokens"] == told["tokens_asked"] == 16 * len(asked.block_hashes)


async def test_an_answer_with_tool_calls_is_kept_while_they_run(
    router: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    for worker in router.workers:
        worker.keep_reason = "the tenant may protect at most 0 blocks"
    try:
        given, request_id = await ask(router, CALL, tools=[TOOL])
        assert (given.retention.returns, given.retention.pin_s) == (True, 0)
        assert (await kept(router)).retention.pin_s == 60
        told = await kept_of(router, request_id)
        assert (told["tokens"], told["why_not"]) == (0, "the tenant may protect at most 0 blocks")
        await asyncio.to_thread(show_why, str(router.http.base_url), request_id)
        assert "kept: 0 of" in (shown := capsys.readouterr().out)
        assert "for 60 s; the tenant may protect at most 0 blocks" in shown
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
            asked = inference_pb2.GetRequestRequest(request_id=request_id)
            record = await InferenceStub(channel).GetRequest(asked, timeout=20)
        assert record.kept.why_not == "the tenant may protect at most 0 blocks"
    finally:
        for worker in router.workers:
            worker.keep_reason = ""


async def test_a_named_function_ends_with_stop_and_is_kept_too(router: RunningRouter) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    _, request_id = await ask(router, CALL, tools=[TOOL], tool_choice=named)
    record = router.router.generator.requests.find(request_id)
    assert record.outcome == "stop"
    assert (await kept(router)).retention.pin_s == 60
    assert (await kept_of(router, request_id))["why_not"] == ""


async def test_text_beside_tools_is_not_kept(router: RunningRouter) -> None:
    _, request_id = await ask(router, "It rains.", tools=[TOOL])
    assert router.router.generator.requests.find(request_id).kept == {}


async def test_grpc_has_the_same_wishes(router: RunningRouter) -> None:
    for worker in router.workers:
        worker.submitted.clear()
    router.script(saying([5, EOS], finish_reason="stop"))
    request = inference_pb2.GenerateRequest(
        text="Hello!", prompt_cache_retention="in_memory", kv_priority=0
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        stub = InferenceStub(channel)
        _ = [each async for each in stub.Generate(request, timeout=20)]
        plain = inference_pb2.GenerateRequest(text="Hello!")
        session = (("x-session-id", "chat 7"),)
        _ = [each async for each in stub.Generate(plain, timeout=20, metadata=session)]
    pinned, of_session = [s.input.retention for w in router.workers for s in w.submitted]
    assert sorted([pinned.pin_s, of_session.pin_s]) == [0, 300]
    assert sorted([pinned.priority, of_session.priority]) == [0, 35]
    assert pinned.returns
    assert of_session.returns
