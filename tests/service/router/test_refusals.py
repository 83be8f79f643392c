"""Each refusal of a request names the field, over HTTP and over gRPC, and nothing is submitted to a
worker or held for it.

Refusals of the wire formats alone, such as wrong types, are in test_openai_requests.py; those of
the other APIs in test_responses.py, test_messages.py and test_embeddings.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JSON_TOOL = json.dumps(TOOL)
DEEP: Any = 1
for _ in range(110):
    DEEP = {"a": DEEP}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}
MANY_BIASES = dict.fromkeys(range(1025), 1.0)
NO_FORM = {"type": "object", "uniqueItems": True}


def sampled(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingParams(**fields)}


def chat(content: str = "hello", role: str = "user", **fields: Any) -> dict[str, Any]:
    message = pb.ChatMessage(role=role, content=content)
    return {"chat": pb.Chat(messages=[message], **fields)}


def form(**fields: Any) -> dict[str, Any]:
    return {"structured_output": pb.StructuredOutput(**fields)}


class Refused(NamedTuple):
    """A field, and requests that are refused because of it: what a body has beside its prompt, and
    a message. None where the wire format cannot say it."""

    field: str
    body: dict[str, Any] | None
    message: dict[str, Any] | None


def same(field: str, value: Any, **more: Any) -> Refused:
    """Returns a row whose body and message have the same fields."""
    return Refused(field, {field: value, **more}, {field: value, **more})


def sampling(field: str, value: Any, **more: Any) -> Refused:
    """Returns a row about a field that a message has in `sampling`."""
    return Refused(field, {field: value, **more}, {**sampled(**{field: value}), **more})


OF_COMPLETIONS = [
    sampling("temperature", 2.1),
    sampling("temperature", -0.1),
    sampling("top_p", -0.1),
    sampling("top_p", 1.1),
    sampling("min_p", 1.5),
    Refused("top_k", {"top_k": -2}, None),
    sampling("top_k", 2**31),
    Refused("seed", {"seed": 2**64}, None),
    sampling("presence_penalty", 2.5),
    sampling("frequency_penalty", -2.5),
    sampling("repetition_penalty", 0.0),
    sampling("repetition_penalty", 101.0),
    sampling("min_tokens", 10, max_tokens=5),
    sampling("min_tokens", 5000),
    Refused("min_tokens", {"min_tokens": -1}, None),
    sampling("bad_words", ["a"] * 129),
    sampling("bad_words", [""]),
    sampling("bad_words", ["a" * 129]),
    Refused("logit_bias", {"logit_bias": {"5": 101}}, sampled(logit_bias={5: 101})),
    Refused("logit_bias", {"logit_bias": {"49152": 1}}, sampled(logit_bias={49152: 1})),
    Refused(
        "logit_bias",
        {"logit_bias": {str(i): bias for i, bias in MANY_BIASES.items()}},
        sampled(logit_bias=MANY_BIASES),
    ),
    Refused("logit_bias", {"logit_bias": {"five": 1}}, None),
    same("stop", ["a"] * 257),
    same("stop", [""]),
    same("stop", ["a" * 1025]),
    same("stop_token_ids", [1] * 129),
    same("stop_token_ids", [49152]),
    same("logprobs", 21),
    same("prompt_logprobs", 21),
    same("truncate_prompt_tokens", 0),
    same("truncate_prompt_tokens", -2),
    same("max_tokens", 0),
    same("n", 0),
    same("n", 129),
    same("best_of", 1, n=2),
    same("best_of", 129),
    same("kv_priority", 101),
    Refused("cache_salt", {"cache_salt": "a" * 1025}, None),
    *(
        Refused("kv_budget", {"kv_budget": budget}, {"kv_budget": pb.KvBudget(**budget)})
        for budget in (
            {"tokens": 0},
            {"tokens": 8, "sinks": 8},
            {"tokens": 8, "policy": "window"},
        )
    ),
    Refused("kv_budget", {"kv_budget": {"sinks": 1}}, None),
    Refused("kv_budget", {"kv_budget": {"tokens": 8, "window": 4}}, None),
    Refused(
        "kv_budget",
        {"kv_budget": {"tokens": 8}, **BEAMS},
        {"kv_budget": pb.KvBudget(tokens=8), **BEAMS},
    ),
    same("length_penalty", 2.0),
    same("length_penalty", 11.0, **BEAMS),
    same("n", 17, use_beam_search=True),
    same("best_of", 3, **BEAMS),
    sampling("presence_penalty", 0.5, **BEAMS),
    sampling("frequency_penalty", 0.5, **BEAMS),
    sampling("repetition_penalty", 1.5, **BEAMS),
    sampling("min_tokens", 1, **BEAMS),
    sampling("bad_words", ["a"], **BEAMS),
    Refused(
        "logit_bias",
        {"logit_bias": {"5": 1}, **BEAMS},
        {**sampled(logit_bias={5: 1}), **BEAMS},
    ),
    same("stop", ["a"], **BEAMS),
    same("stop_token_ids", [5], **BEAMS),
    same("logprobs", 1, **BEAMS),
    same("prompt_logprobs", 1, **BEAMS),
    same("echo", True, **BEAMS),
    Refused("guided_regex", {"guided_regex": "a", **BEAMS}, None),
    Refused("structured_output", None, {**form(regex="a"), **BEAMS}),
    Refused("prompt", {"prompt": ""}, {"text": ""}),
    Refused("prompt", {"prompt": [49152]}, {"token_ids": pb.TokenIds(ids=[49152])}),
    Refused("prompt", {"prompt": [1] * 2048}, {"token_ids": pb.TokenIds(ids=[1] * 2048)}),
    Refused("stream_options", {"stream_options": {"include_usage": True}}, None),
    Refused("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, None),
    Refused("use_beam_search", {**BEAMS, "stream": True}, None),
    Refused("best_of", {"best_of": 2, "stream": True}, None),
    Refused("guided_json", {"guided_json": NO_FORM}, form(json_schema=json.dumps(NO_FORM))),
    Refused("guided_json", {"guided_json": "{"}, form(json_schema="{")),
    Refused("guided_json", {"guided_json": DEEP}, None),
    Refused("guided_regex", {"guided_regex": "("}, form(regex="(")),
    Refused("guided_regex", {"guided_regex": "a" * (129 << 10)}, form(regex="a" * (129 << 10))),
    Refused("guided_grammar", {"guided_grammar": "start: ("}, form(grammar="start: (")),
    Refused("guided_choice", {"guided_choice": []}, None),
    Refused("regex", {"regex": ""}, None),
    Refused("ebnf", {"ebnf": "root ::= ("}, None),
    Refused("grammar", {"grammar": "root ::= ("}, None),
    Refused("json_schema", {"json_schema": NO_FORM}, None),
    Refused("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, None),
    Refused("structured_output", None, {"structured_output": pb.StructuredOutput()}),
    Refused("guided_regex", {"guided_regex": "a", "guided_json": {}}, None),
    Refused("response_format", {"response_format": {"type": "json_schema"}}, None),
    Refused("response_format", {"response_format": {"type": "text", "schema": {}}}, None),
    Refused("suffix", {"suffix": "a"}, None),
]
OF_CHATS = [
    Refused("messages", {"messages": []}, {"chat": pb.Chat()}),
    Refused("messages", {"messages": [{"role": "a b", "content": "x"}]}, chat(role="a b")),
    Refused("messages", {"messages": [{"role": "user"}]}, None),
    Refused(
        "messages", {"messages": [{"role": "user", "content": "x " * 4000}]}, chat("x " * 4000)
    ),
    Refused(
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        None,
    ),
    Refused("top_logprobs", {"top_logprobs": 21, "logprobs": True}, {**chat(), "logprobs": 21}),
    Refused("top_logprobs", {"top_logprobs": 1}, None),
    Refused("max_tokens", {"max_tokens": 5, "max_completion_tokens": 5}, None),
    Refused("best_of", {"best_of": 2}, {**chat(), "best_of": 2}),
    Refused("tools", {"tools": [5]}, chat(tools=["5"])),
    Refused("tools", None, chat(tools=['{"type": "web_search"}'])),
    Refused("tools", {"tools": [TOOL] * 1025}, chat(tools=[JSON_TOOL] * 1025)),
    Refused(
        "tools",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        None,
    ),
    Refused("tools", {"tools": [TOOL], **BEAMS}, {**chat(tools=[JSON_TOOL]), **BEAMS}),
    Refused("tool_choice", {"tool_choice": "required"}, chat(tool_choice="required")),
    Refused("tool_choice", {"tool_choice": "perhaps"}, chat(tool_choice="perhaps")),
    Refused(
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        chat(tools=[JSON_TOOL], tool_choice="required", function="g"),
    ),
    Refused(
        "tool_choice",
        {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
        {**chat(tools=[JSON_TOOL], tool_choice="required"), **form(regex="a")},
    ),
    Refused("function", None, chat(tools=[JSON_TOOL], function="f")),
    Refused(
        "chat_template_kwargs",
        {"chat_template_kwargs": DEEP},
        chat(chat_template_kwargs=json.dumps(DEEP)),
    ),
    Refused(
        "add_generation_prompt",
        {"add_generation_prompt": True, "continue_final_message": True},
        chat(add_generation_prompt=True, continue_final_message=True),
    ),
    Refused("audio", {"audio": {"voice": "x"}}, None),
]
ROWS = [
    *((f"{i} {row.field}", "/v1/completions", row) for i, row in enumerate(OF_COMPLETIONS)),
    *((f"chat {i} {row.field}", "/v1/chat/completions", row) for i, row in enumerate(OF_CHATS)),
]


# Of a part of the field, or as a message of gRPC calls it.
OTHER_NAMES = {"messages": ("role", "prompt"), "top_logprobs": ("logprobs",)}


def names(field: str, text: str) -> bool:
    """Returns whether the text of an error says which field it is about."""
    return any(name in text for name in (field, *OTHER_NAMES.get(field, ("structured_output",))))


@pytest_asyncio.fixture(loop_scope="module")
async def channel(router: RunningRouter) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.router.grpc_port}") as channel:
        yield channel


async def test_each_is_a_400_that_names_the_field(router: RunningRouter) -> None:
    wrong = []
    for name, path, row in ROWS:
        if row.body is None:
            continue
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": HELLO}
        try:
            answer = await router.http.post(path, json={**prompt, **row.body})
        except httpx.ReadTimeout:
            wrong.append((name, "served"))
            continue
        error = answer.json().get("error", {})
        named = names(row.field, error.get("message", ""))
        if (answer.status_code, error.get("param"), named) != (400, row.field, True):
            wrong.append((name, f"{answer.status_code}: {error}"))
    assert not wrong
    assert not router.submitted
    assert router.num_running() == 0


async def test_each_is_an_invalid_argument_that_names_the_field(
    router: RunningRouter, channel: grpc.aio.Channel
) -> None:
    wrong = []
    generate = InferenceStub(channel).Generate
    for name, _, row in ROWS:
        if row.message is None:
            continue
        prompt = {} if row.message.keys() & {"text", "token_ids", "chat"} else {"text": "x"}
        try:
            async for _ in generate(pb.GenerateRequest(**prompt, **row.message), timeout=20):
                pass
            wrong.append((name, "served"))
        except grpc.aio.AioRpcError as error:
            named = names(row.field, str(error.details()))
            if (error.code(), named) != (grpc.StatusCode.INVALID_ARGUMENT, True):
                wrong.append((name, f"{error.code()}: {error.details()}"))
    assert not wrong
    assert not router.submitted
    assert router.num_running() == 0
