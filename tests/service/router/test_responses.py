"""OpenAI's responses with OpenAI's client: real tokens of a Hermes model that thinks."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import openai
import openapi_spec_validator
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tandem.api.http import stream as streams
from tests.harness.models import HERMES_TEMPLATE, with_template
from tests.harness.scripted_worker import refusal, saying, update
from tests.service.router.conftest import RunningRouter

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

KEPT_MAX = 4
ROUTER = {"responses_kept": KEPT_MAX}
EOS = 2
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Paris", "Rome")
)
TEXT = f"<think>\nTwo cities.\n</think>\n\nLet me look.\n{CALLS}"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another chat template."""
    return with_template(tmp_path_factory.mktemp("model") / "tiny", HERMES_TEMPLATE)


def says(router: RunningRouter, text: str, **more: Any) -> int:
    """Scripts the next answer, and forgets the requests before it. Returns its tokens."""
    for worker in router.workers:
        worker.submitted.clear()
    ids = [*router.tokenizer.encode(text, add_special_tokens=False), EOS]
    router.script(saying(ids, finish_reason="stop", **more))
    return len(ids)


async def ask(router: RunningRouter, **body: Any) -> Any:
    return await router.openai.responses.create(
        **{"model": "tiny", "input": "Paris or Rome?", **body}
    )


def prompt_of(router: RunningRouter) -> str:
    """Returns the text of the prompt that a worker got since the last `says`."""
    (submit,) = router.submitted
    return router.tokenizer.decode(submit.input.token_ids, skip_special_tokens=False)  # type: ignore[attr-defined]


async def events_of(router: RunningRouter, **body: Any) -> list[dict[str, Any]]:
    """Returns the data of a stream's events, each valid for OpenAI's own models."""
    asked = {"model": "tiny", "input": "Paris or Rome?", "stream": True, **body}
    answer = await router.http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    told = []
    for event in events:
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
        EVENT.validate_python(told[-1], strict=False)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    return told


def without_ids(response: dict[str, Any]) -> Any:
    """Returns a response without what differs between two equal ones."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID")
    plain = json.loads(text)
    for item in plain["output"]:
        item.pop("call_id", None)
    return {k: v for k, v in plain.items() if k not in ("created_at", "completed_at")}


async def test_a_response_has_reasoning_text_and_calls(router: RunningRouter) -> None:
    num_tokens = says(router, TEXT, cached_tokens=7)
    response = await ask(router, tools=[WEATHER], metadata={"a": "b"}, max_output_tokens=200)
    Response.model_validate(response.model_dump())
    assert (response.status, response.model, response.output_text) == (
        "completed",
        "tiny",
        "Let me look.",
    )
    reasoning, message, *calls = response.output
    assert [part.text for part in reasoning.content] == ["Two cities."]
    assert (message.role, message.status) == ("assistant", "completed")
    assert [(c.type, c.name, json.loads(c.arguments)) for c in calls] == [
        ("function_call", "get_weather", {"city": city}) for city in ("Paris", "Rome")
    ]
    usage = response.usage
    (submit,) = router.submitted
    assert usage.input_tokens == len(submit.input.token_ids)  # type: ignore[attr-defined]
    assert usage.input_tokens_details.cached_tokens == 7
    assert usage.output_tokens == num_tokens
    thought = router.tokenizer.encode("<think>\nTwo cities.\n</think>")
    assert usage.output_tokens_details.reasoning_tokens == len(thought)
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 200)
    assert response.tools[0].name == "get_weather"
    found = await router.http.get(f"/v1/requests/{response.id}")
    assert found.json()["usage"]["completion_tokens"] == num_tokens


async def test_a_stream_builds_up_the_response(router: RunningRouter) -> None:
    says(router, TEXT)
    whole = (
        await router.http.post("/v1/responses", json={"input": "x", "tools": [WEATHER]})
    ).json()
    events = await events_of(router, input="x", tools=[WEATHER])
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        own = [e for e in events if e.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert {e["item_id"] for e in own if "item_id" in e} == {item["id"]}
        deltas = "".join(e["delta"] for e in own if e["type"].endswith(".delta"))
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == text
    pieces = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 4, "arguments stream"


async def test_calls_can_be_forced(router: RunningRouter) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        says(router, CALLS.split("\n</tool_call>")[0] + "\n</tool_call>")
        response = await ask(router, tools=[WEATHER], tool_choice=choice)
        assert response.status == "completed"
        assert [item.type for item in response.output] == ["function_call"]
        (submit,) = router.submitted
        assert "get_weather" in submit.input.grammar  # type: ignore[attr-defined]


async def test_only_allowed_tools_are_called(router: RunningRouter) -> None:
    time = {"type": "function", "name": "get_time"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [time, {"type": "web_search"}]}
    for tools, kind in ((allowed["tools"], "message"), ([time, WEATHER], "function_call")):
        says(router, CALLS)
        asked = {"tools": [WEATHER, time], "tool_choice": {**allowed, "tools": tools}}
        response = await ask(router, extra_body=asked)
        assert {item.type for item in response.output} == {kind}
        assert response.tool_choice.mode == "auto"
    says(router, CALLS)
    await ask(router, extra_body={**asked, "tool_choice": {**allowed, "mode": "required"}})
    (submit,) = router.submitted
    assert "get_time" in submit.input.grammar  # type: ignore[attr-defined]
    assert "get_weather" not in submit.input.grammar  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "form", [{"choice": ["Rome.", "Paris."]}, {"json": {"enum": ["Rome.", "Paris."]}}]
)
async def test_structured_outputs_are_the_form_of_the_answer(
    router: RunningRouter, form: dict[str, Any]
) -> None:
    says(router, '"Rome."')
    await ask(router, extra_body={"structured_outputs": form})
    (submit,) = router.submitted
    assert "Paris." in submit.input.grammar  # type: ignore[attr-defined]


async def test_the_clients_stream_and_parse(router: RunningRouter) -> None:
    class City(BaseModel):
        city: str

    says(router, '{"city": "Rome"}')
    parsed = await router.openai.responses.parse(model="tiny", input="x", text_format=City)
    assert parsed.output_parsed == City(city="Rome")
    (submit,) = router.submitted
    assert "city" in submit.input.grammar  # type: ignore[attr-defined]
    says(router, TEXT)
    async with router.openai.responses.stream(model="tiny", input="x", tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Let me look."
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


async def test_items_reach_the_template_as_a_chat_does(router: RunningRouter) -> None:
    says(router, TEXT)
    said = await ask(router, tools=[WEATHER])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": text}
        for item, text in zip(
            said.output[2:], ("Sunny", [{"type": "input_text", "text": "Rain"}]), strict=True
        )
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Paris or Rome?"}]},
        *said.model_dump()["output"],
        *outputs,
    ]
    says(router, "Rome.")
    answer = await ask(router, input=items, tools=[WEATHER], instructions="Be brief.")
    assert answer.output_text == "Rome."
    prompt = prompt_of(router)
    message = said.output[1].content[0].text
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in said.output[2:]
    ]
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris or Rome?"},
        {"role": "assistant", "content": message, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Sunny"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "Rain"},
    ]
    tool = {k: v for k, v in WEATHER.items() if k not in ("type", "strict")}
    says(router, "Rome.")
    await router.openai.chat.completions.create(
        model="tiny", messages=chat, tools=[{"type": "function", "function": tool}]
    )
    assert prompt_of(router) == prompt
    assert "<tool_response>\nRain\n</tool_response>" in prompt


async def test_a_kept_response_is_read_continued_and_deleted(router: RunningRouter) -> None:
    says(router, "<think>\nHm.\n</think>\n\nRome.")
    first = await ask(router, instructions="Be brief.")
    assert first.model_dump()["store"] is True
    read = await router.openai.responses.retrieve(first.id)
    assert read.to_dict() == first.to_dict()
    says(router, "Because.")
    second = await ask(router, input="Why?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(router)
    assert "user\nParis or Rome?<|im_end|>\n<|im_start|>assistant\nRome.<|im_end|>" in prompt
    assert prompt.endswith("user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert "Be brief." not in prompt
    says(router, "So.")
    events = await events_of(router, input="And?", previous_response_id=second.id)
    third = events[-1]["response"]["id"]
    assert "assistant\nBecause.<|im_end|>\n<|im_start|>user\nAnd?" in prompt_of(router)
    assert (await router.openai.responses.retrieve(third)).id == third
    await router.openai.responses.delete(third)
    with pytest.raises(openai.NotFoundError) as gone:
        await router.openai.responses.retrieve(third)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.delete(third)
    with pytest.raises(openai.BadRequestError) as lost:
        await ask(router, previous_response_id=third)
    assert (lost.value.code, lost.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_the_oldest_are_forgotten_and_some_are_never_kept(router: RunningRouter) -> None:
    says(router, "Hi!")
    unkept = await ask(router, store=False)
    assert unkept.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.retrieve(unkept.id)
    ids = [(await ask(router)).id for _ in range(KEPT_MAX + 1)]
    for response_id in ids[1:]:
        await router.openai.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.retrieve(ids[0])


async def test_an_answer_that_is_cut_is_incomplete(router: RunningRouter) -> None:
    says(router, "one two three")
    cut = await ask(router, max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"
    events = await events_of(router, max_output_tokens=1)
    assert events[-1]["type"] == "response.incomplete"


async def test_an_answer_without_text_has_an_empty_message(router: RunningRouter) -> None:
    says(router, "")
    empty = await ask(router)
    assert (empty.output_text, [item.type for item in empty.output]) == ("", ["message"])


async def test_log_probabilities_are_with_the_text(router: RunningRouter) -> None:
    text = "One two"
    ids = router.tokenizer.encode(text)

    async def script(submit: Any, say: Any) -> None:
        for index, token_id in enumerate([*ids, EOS]):
            entry = {"logprob": -0.5, "rank": 1, "top_ids": [token_id], "top_logprobs": [-0.5]}
            reason = "stop" if index == len(ids) else ""
            say(update(submit, [token_id], reason, logprobs=[entry]))

    router.script(script)
    include: list[Any] = ["message.output_text.logprobs"]
    response = await ask(router, include=include, top_logprobs=1)
    part = response.output[0].content[0]
    assert "".join(one.token for one in part.logprobs) == text
    assert [len(one.top_logprobs) for one in part.logprobs] == [1] * len(ids)
    events = await events_of(router, include=include, top_logprobs=1)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(one["token"] for e in deltas for one in e["logprobs"]) == text


async def test_an_error_in_mid_stream_fails_the_response(router: RunningRouter) -> None:
    async def breaks(submit: Any, say: Any) -> None:
        say(update(submit, [router.tokenizer.encode("Hi")[0]]))
        say(refusal(submit, "internal_error"))

    router.script(breaks)
    asked = {"input": "x", "stream": True}
    answer = await router.http.post("/v1/responses", json=asked)
    assert "[DONE]" not in answer.text
    data = [
        json.loads(event.split("\n")[1].removeprefix("data: "))
        for event in answer.text.strip().split("\n\n")
    ]
    error, failed = data[-2:]
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == (
        "failed",
        "server_error",
    )
    for event in (error, failed):
        EVENT.validate_python(event)
    with pytest.raises(openai.NotFoundError):
        await router.openai.responses.retrieve(failed["response"]["id"])


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_bug_in_mid_stream_is_an_error_event(
    router: RunningRouter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says_more(submit: Any, say: Any) -> None:
        for word in ("Hi", " you"):
            say(update(submit, [router.tokenizer.encode(word)[0]]))
            await asyncio.sleep(0.2)
        say(update(submit, [], finish_reason="stop"))

    router.script(says_more)
    build, num_built = streams._build, count()

    async def breaks(deltas: Any, make: Any) -> Any:
        if next(num_built):
            raise ZeroDivisionError
        return await build(deltas, make)

    monkeypatch.setattr(streams, "_build", breaks)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    body = {"model": "tiny", "stream": True, **({"input": "x"} if path == "responses" else chat)}
    answer = await router.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200
    assert "an internal error of the router (ZeroDivisionError)" in answer.text
    assert "[DONE]" not in answer.text


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
NO_SCHEMA = {
    "format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}, "strict": True}
}


TWICE = {"type": "function", "name": "twice", "parameters": {"type": "object"}}
PDF = {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}


@pytest.mark.parametrize(
    ("field", "value", "says_what"),
    [
        ("input", [IMAGE], "takes text only"),
        ("input", [{"type": "teleport_call", "id": "x"}], "'teleport_call'"),
        ("input", [{"role": "user", "content": [PDF]}], "application/pdf"),
        ("input", [{"type": "function_call", "name": "f"}], "call_id"),
        ("input", [], "input must be"),
        ("input", 5, "input is not valid"),
        ("tools", [{"type": "function"}], "name"),
        ("tools", [{"type": "web_search"}, {"type": None}], "tools.0"),
        ("tools", [{"type": "custom"}], "tools.0.custom.name"),
        ("tools", [{"type": "namespace", "name": "n", "tools": [{}]}], "tools.0.namespace.tools"),
        ("tools", [{"type": "web_search"}, "web_search"], "tools is not valid"),
        ("tools", {"type": "web_search"}, "tools is not valid"),
        ("tools", [TWICE, {"type": "custom", "name": "twice"}], "two functions with the name"),
        ("tools", [{"type": "namespace", "name": "n", "tools": [TWICE, TWICE]}], "two functions"),
        ("tool_choice", {"type": "web_search"}, "tool_choice"),
        ("tool_choice", "required", "the request has no tools"),
        ("background", True, "background is not supported"),
        ("conversation", "conv_1", "conversation is not supported"),
        ("include", [5], "include"),
        ("prompt", {"id": "pmpt_1"}, "prompt is not supported"),
        ("text", NO_SCHEMA, "text cannot"),
        ("reasoning", {"effort": 5}, "reasoning is not valid"),
        ("structured_outputs", {}, "structured_outputs must be"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto"}, "tool_choice"),
        ("tool_choice", {"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice"),
        ("max_output_tokens", 0, "max_output_tokens must be"),
        ("temperature", 3.0, "temperature must be"),
        ("top_logprobs", 21, "top_logprobs"),
        ("truncation", "middle", "truncation"),
        ("previous_response_id", "resp_other", "not found"),
        ("metadata", {"a": 1}, "metadata"),
    ],
)
async def test_each_refusal_names_the_field(
    router: RunningRouter, field: str, value: Any, says_what: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(router, extra_body={field: value})
    assert raised.value.param == field
    assert says_what in raised.value.message
    assert not router.submitted


async def test_null_in_an_object_means_absent(router: RunningRouter) -> None:
    says(router, "Hi!")
    body = {"input": "x", "text": {"format": None}, "reasoning": {"effort": None}}
    assert (await router.http.post("/v1/responses", json=body)).status_code == 200


async def test_media_in_outputs_and_calls_of_hosted_tools_are_left_out(
    router: RunningRouter,
) -> None:
    says(router, "Hi!")
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    file = {"type": "input_file", "file_id": "file-1"}
    text = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGkh"}
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": None},
        {"type": "local_shell_call", "id": "x"},
        {"type": "program", "id": "p", "call_id": "p", "code": "1", "fingerprint": "x"},
        {"type": "program_output", "id": "q", "call_id": "p", "result": "1"},
        {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image, file, text]},
    ]
    answer = await router.http.post("/v1/responses", json={"input": items})
    assert answer.status_code == 200, answer.text
    output = "input.function_call_output"
    hosted = "input.local_shell_call, input.program, input.program_output"
    left_out = f"{hosted}, {output}.input_image, {output}.input_file"
    assert left_out in answer.headers["warning"]
    read = "a.txt\nHi!\n(An image was left out here.)\n(A file was left out here.)"
    assert read in prompt_of(router)


HOSTED: list[Any] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
]


async def test_tools_that_the_client_does_not_run_are_left_out(router: RunningRouter) -> None:
    for stream in (False, True):
        says(router, TEXT)
        asked = {"input": "x", "tools": [HOSTED[0], WEATHER, HOSTED[1]], "stream": stream}
        answer = await router.http.post("/v1/responses", json=asked)
        assert answer.status_code == 200
        named = "tools.web_search, tools.mcp"
        assert answer.headers["warning"] == (
            f'299 tandem "parts of the request are left out: {named}"'
        )
        assert answer.text.count("get_weather") > 2
        prompt = prompt_of(router)
        assert "get_weather" in prompt
        assert "web_search" not in prompt
    says(router, "Hi!")
    many = [{"type": f"kind_{i}", "name": "é" * 99} for i in range(1000)]
    answer = await router.http.post("/v1/responses", json={"input": "x", "tools": many * 2})
    assert (answer.status_code, answer.json()["tools"]) == (200, [])
    assert answer.headers["warning"].endswith('and 992 more"')
    assert len(answer.headers["warning"]) < 500


@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, "required"]
)
async def test_no_tool_that_is_left_out_can_be_chosen(router: RunningRouter, choice: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match="needs a tool of an unsupported type"
    ) as raised:
        await ask(router, extra_body={"tools": HOSTED, "tool_choice": choice})
    assert raised.value.param == "tool_choice"
    assert not router.submitted


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
AGENTS: list[Any] = [
    {"type": "namespace", "name": "agents", "description": "d", "tools": [SPAWN, *HOSTED]},
    {"type": "namespace", "name": "more", "tools": [SPAWN, {**WEATHER, "name": "now"}]},
    WEATHER,
]
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits a file",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


async def test_functions_of_namespaces_are_called_by_their_names(router: RunningRouter) -> None:
    calls = [call_of(name, "{}") for name in ("spawn", "more__spawn", "now", "get_weather")]
    says(router, "".join(calls))
    answer = await router.http.post("/v1/responses", json={"input": "x", "tools": AGENTS})
    assert answer.status_code == 200, answer.text
    assert "tools.agents.web_search" in answer.headers["warning"]
    Response.model_validate(answer.json())
    items = answer.json()["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("spawn", "agents"),
        ("spawn", "more"),
        ("now", "more"),
        ("get_weather", None),
    ]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
    ]
    says(router, "Done.")
    asked = {"input": [{"role": "user", "content": "x"}, *items, *outputs], "tools": AGENTS}
    assert (await router.http.post("/v1/responses", json=asked)).status_code == 200
    prompt = prompt_of(router)
    said = prompt.rpartition("<|im_start|>user\nx")[2]
    for name in ("spawn", "more__spawn", "now", "get_weather"):
        assert said.count(f'{{"name": "{name}"') == 1, said
    says(router, calls[1])
    choice = {"type": "function", "name": "spawn", "namespace": "more"}
    asked = {"input": "x", "tools": AGENTS, "tool_choice": choice}
    answer = await router.http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    (submit,) = router.submitted
    assert "more__spawn" in submit.input.grammar  # type: ignore[attr-defined]


async def test_codex_sends_tools_and_messages_of_agents_as_items(router: RunningRouter) -> None:
    says(router, call_of("spawn", "{}"))
    tools = {"type": "additional_tools", "role": "developer", "tools": [*AGENTS, HOSTED[0]]}
    body = {"input": [tools, {"role": "user", "content": "x"}], "tools": [WEATHER]}
    answer = await router.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "tools.web_search" in answer.headers["warning"]
    assert answer.json()["output"][0]["namespace"] == "agents"
    assert prompt_of(router).count('{"name": "get_weather"') == 1
    parts = [{"type": "encrypted_content", "encrypted_content": "x"}]
    parts += [{"type": "input_text", "text": "Sender: /root/a\nPayload:\n4"}]
    message = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": parts}
    says(router, "Four.")
    answer = await router.http.post("/v1/responses", json={"input": [message]})
    assert answer.status_code == 200, answer.text
    assert "<|im_start|>user\nSender: /root/a\nPayload:\n4<|im_end|>" in prompt_of(router)


async def test_a_custom_tool_gets_its_text(router: RunningRouter) -> None:
    text = 'a "b"\n\\c'
    call = call_of("apply_patch", json.dumps({"input": text}))
    for stream in (False, True):
        says(router, call)
        if stream:
            events = await events_of(router, tools=[PATCH, WEATHER])
            own = [event for event in events if "custom_tool_call" in event["type"]]
            assert [event["type"] for event in own] == [
                "response.custom_tool_call_input.delta",
                "response.custom_tool_call_input.done",
            ]
            assert (own[0]["delta"], own[1]["input"]) == (text, text)
            response = events[-1]["response"]
        else:
            asked = {"input": "x", "tools": [PATCH, WEATHER]}
            response = (await router.http.post("/v1/responses", json=asked)).json()
        Response.model_validate(response)
        (item,) = response["output"]
        assert (item["type"], item["name"], item["input"]) == (
            "custom_tool_call",
            "apply_patch",
            text,
        )
        assert item["id"].startswith("ctc_")
        assert response["tools"][0] == PATCH
        assert "start: /.+/" in prompt_of(router), "the grammar of the text is told"
    says(router, "Done.")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    asked = {"input": [{"role": "user", "content": "x"}, item, result], "tools": [PATCH]}
    assert (await router.http.post("/v1/responses", json=asked)).status_code == 200
    said = prompt_of(router).rpartition("<|im_start|>user\nx")[2]
    assert json.dumps({"input": text}) in said
    assert "<tool_response>\nok" in said
    says(router, call)
    choice = {"type": "custom", "name": "apply_patch"}
    asked = {"input": "x", "tools": [PATCH], "tool_choice": choice}
    forced = await router.http.post("/v1/responses", json=asked)
    assert [item["type"] for item in forced.json()["output"]] == ["custom_tool_call"]


@pytest.mark.parametrize(
    ("text", "max_tokens"),
    [
        (TEXT, 400),
        ("<think>\nTwo cities.", 400),
        ("<think>\nTwo cities, or", 5),
        (TEXT, 42),
        (call_of("apply_patch", '{"input": "some text of a patch"}'), 20),
        ("", 400),
    ],
)
async def test_an_answer_can_be_sent_back_wherever_it_was_cut(
    router: RunningRouter, text: str, max_tokens: int
) -> None:
    says(router, text)
    tools = [WEATHER, PATCH]
    asked = {"input": "x", "tools": tools, "max_output_tokens": max_tokens}
    answer = await router.http.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    items = answer.json()["output"]
    user = {"role": "user", "content": "Go on."}
    for after in ([user], []):
        says(router, "Yes.")
        again = {"input": [user, *items, *after], "tools": tools}
        answer = await router.http.post("/v1/responses", json=again)
        assert answer.status_code == 200, answer.text


async def test_hints_of_a_response_are_named(router: RunningRouter) -> None:
    says(router, "Hi!")
    body = {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    }
    answer = await router.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == (
        '299 tandem "parts of the request are left out: input.web_search_call, '
        'include.web_search_call.action.sources", 299 tandem "fields without effect: '
        'context_management, text.verbosity", 299 tandem "fields without effect: reasoning.effort"'
    )


async def test_items_may_be_named_instead_of_sent(router: RunningRouter) -> None:
    says(router, "Rome.")
    first = (await router.http.post("/v1/responses", json={"input": "Paris or Rome?"})).json()
    says(router, "Because.")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    asked = [{"role": "user", "content": "Paris or Rome?"}, reference]
    asked.append({"role": "user", "content": "Why?"})
    answer = await router.http.post("/v1/responses", json={"input": asked})
    assert answer.status_code == 200, answer.text
    assert "assistant\nRome.<|im_end|>" in prompt_of(router)
    listed = await router.openai.responses.input_items.list(first["id"])
    says(router, "Because.")
    asked[0] = {"type": "item_reference", "id": listed.data[0].id}
    answer = await router.http.post("/v1/responses", json={"input": asked})
    assert answer.status_code == 200, answer.text
    assert "user\nParis or Rome?<|im_end|>" in prompt_of(router)
    asked[1] = {"type": "item_reference", "id": "msg_1"}
    lost = await router.http.post("/v1/responses", json={"input": asked})
    assert lost.status_code == 404
    assert lost.json()["error"]["code"] == "item_not_found"
    assert "Item with id 'msg_1' not found" in lost.json()["error"]["message"]


async def test_a_long_input_is_cut_only_if_asked(router: RunningRouter) -> None:
    says(router, "Hi!")
    long = "word " * 3000
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        await ask(router, input=long)
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "input"
    cut = await ask(router, input=long, truncation="auto", max_output_tokens=20)
    assert cut.usage.input_tokens == 2048 - 20


async def test_small_rules(router: RunningRouter) -> None:
    says(router, "Hi!")
    raw = await router.openai.responses.with_raw_response.create(
        model="tiny", input="x", user="me", extra_body={"wings": 2}
    )
    assert raw.headers["warning"] == '299 tandem "unknown fields of the request are ignored: wings"'
    for method, path, status in (
        ("GET", "/v1/responses", 405),
        ("PUT", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/v1/responses/resp_1?stream=true", 400),
        ("DELETE", "/v1/responses/resp_1", 404),
    ):
        headers = {"content-type": "application/json"}
        answer = await router.http.request(method, path, headers=headers)
        assert answer.status_code == status, (method, path)
        if path.endswith("resp_1") and status == 405:
            assert answer.headers["allow"] == "DELETE, GET, HEAD"
    document = (await router.http.get("/openapi.json")).json()
    openapi_spec_validator.validate(document)
    assert {"ResponsesBody", "FunctionCallItem"} <= document["components"]["schemas"].keys()
