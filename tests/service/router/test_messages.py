"""Anthropic's API with Anthropic's client: real tokens of a Hermes model that thinks."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openapi_spec_validator
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from pydantic import BaseModel

from tandem.api.anthropic.requests import parse_messages
from tandem.router.request.conversation import Conversation
from tests.harness.models import HERMES_TEMPLATE, with_template
from tests.harness.scripted_worker import refusal, refusing, saying, update
from tests.service.router.conftest import RunningRouter, eventually

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]

EOS = 2
ASKED: list[Any] = [{"role": "user", "content": "Paris or Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Paris", "Rome")
)
TEXT = f"<think>\nTwo cities.\n</think>\n\nLet me look.\n{CALLS}"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with another chat template."""
    return with_template(tmp_path_factory.mktemp("model") / "tiny", HERMES_TEMPLATE)


@pytest_asyncio.fixture(loop_scope="module")
async def client(router: RunningRouter) -> AsyncIterator[AsyncAnthropic]:
    url = str(router.http.base_url)
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def says(router: RunningRouter, text: str, **more: Any) -> int:
    """Scripts the next answer, and forgets the requests before it. Returns its tokens."""
    for worker in router.workers:
        worker.submitted.clear()
        worker.kept.clear()
    ids = [*router.tokenizer.encode(text, add_special_tokens=False), EOS]
    router.script(saying(ids, finish_reason="stop", **more))
    return len(ids)


async def ask(client: AsyncAnthropic, **body: Any) -> Any:
    asked = {"model": "tiny", "max_tokens": 200, "messages": ASKED, **body}
    return await client.messages.create(**asked)


def prompt_of(router: RunningRouter) -> str:
    """Returns the text of the prompt that a worker got since the last `says`."""
    (submit,) = router.submitted
    return router.tokenizer.decode(submit.input.token_ids, skip_special_tokens=False)  # type: ignore[attr-defined]


async def test_a_message_has_thinking_text_and_calls(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    num_tokens = says(router, TEXT, cached_tokens=7)
    message = await ask(client, tools=[WEATHER])
    assert isinstance(message, anthropic.types.Message)
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "tool_use")
    thought, text, *calls = message.content
    assert (thought.thinking, bool(thought.signature), text.text) == (
        "Two cities.",
        True,
        "Let me look.",
    )
    assert [(c.type, c.name, c.input) for c in calls] == [
        ("tool_use", "get_weather", {"city": city}) for city in ("Paris", "Rome")
    ]
    usage = message.usage
    (submit,) = router.submitted
    num_prompt = len(submit.input.token_ids)  # type: ignore[attr-defined]
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - 7, 7)
    num_thought = len(router.tokenizer.encode("<think>\nTwo cities.\n</think>"))
    assert usage.output_tokens == num_tokens
    assert usage.output_tokens_details.thinking_tokens == num_thought
    found = await router.http.get(f"/v1/requests/{message.id}")
    assert found.json()["usage"]["completion_tokens"] == num_tokens


async def test_a_stream_joins_to_the_message(router: RunningRouter, client: AsyncAnthropic) -> None:
    says(router, TEXT)
    whole = await ask(client, tools=[WEATHER])
    async with client.messages.stream(
        model="tiny", max_tokens=200, messages=ASKED, tools=[WEATHER]
    ) as stream:
        names = [event.type async for event in stream]
        joined = await stream.get_final_message()
    ours, theirs = joined.to_dict(), whole.to_dict()
    for message in (ours, theirs):
        message.pop("id")
        message.pop("usage")
        for block in message["content"]:
            block.pop("id", None)
    assert ours == {**theirs, **{k: v for k, v in ours.items() if k not in theirs}}
    assert joined.usage.output_tokens == whole.usage.output_tokens
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    assert names.count("input_json") > 4, "arguments stream"


async def test_the_events_come_in_anthropics_order(router: RunningRouter) -> None:
    says(router, "Hi!")
    body = {"model": "tiny", "max_tokens": 20, "messages": ASKED, "stream": True}
    answer = await router.http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name for name, _ in events] == [f"event: {one['type']}" for one in data]
    kinds = [one["type"] for one in data]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[0]["message"]["content"] == []
    assert data[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == len(router.tokenizer.encode("Hi!")) + 1


async def test_a_history_reaches_the_template(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    """A message of the client goes back as it came, and equals the chat that says the same."""
    says(router, TEXT)
    said = await ask(client, tools=[WEATHER])
    calls = [block for block in said.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "Sunny"},
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": None},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "Rain", "cache_control": {"type": "ephemeral"}}],
        },
        {"type": "text", "text": "So?"},
    ]
    system: list[Any] = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    history = [*ASKED, said.to_param(), {"role": "user", "content": results}]
    says(router, "Rome.")
    answer = await ask(client, messages=history, tools=[WEATHER], system=system)
    assert (answer.content[0].text, answer.stop_reason) == ("Rome.", "end_turn")
    prompt = prompt_of(router)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "Let me look.<tool_call>" in prompt
    assert "<tool_response>\nSunny\n</tool_response>" in prompt
    assert "<tool_response>\n\n</tool_response>" in prompt
    assert "<tool_response>\nRain\n</tool_response><|im_end|>\n<|im_start|>user\nSo?" in prompt
    counted = await client.messages.count_tokens(
        model="tiny", messages=history, tools=[WEATHER], system=system
    )
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_creation_input_tokens
    # A text of the history has a mark: what is in full blocks before it is created, and pinned.
    (submit,) = router.submitted
    given = submit.input  # type: ignore[attr-defined]
    num_pinned = given.retention.num_tokens
    beginning = router.tokenizer.decode(list(given.token_ids)[:num_pinned])
    assert beginning.strip().endswith("Rain\n</tool_response>")
    assert usage.cache_creation_input_tokens == num_pinned // 16 * 16

    def num_kept() -> set[int]:
        return {len(each.block_hashes) for worker in router.workers for each in worker.kept}

    await eventually(lambda: num_pinned // 16 in num_kept(), deadline_s=30)
    assert usage.cache_creation.ephemeral_5m_input_tokens == usage.cache_creation_input_tokens


async def test_an_answer_goes_on_from_the_assistants_words(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, " blue.")
    await ask(client, messages=[*ASKED, {"role": "assistant", "content": "The sky is"}])
    assert prompt_of(router).endswith("assistant\nThe sky is")


async def test_thinking_is_switched_by_the_template(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    off = "<think>\n\n</think>\n\n"
    for thinking, ends_off in (("disabled", True), ("enabled", False), ("adaptive", False)):
        says(router, "Yes.")
        budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
        await ask(client, thinking={"type": thinking, **budget})
        assert prompt_of(router).endswith(off) == ends_off


async def test_why_an_answer_ended(router: RunningRouter, client: AsyncAnthropic) -> None:
    says(router, "one two three")
    cut = await ask(client, max_tokens=1)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
    says(router, "one two three")
    stopped = await ask(client, stop_sequences=[" two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
    assert stopped.content[0].text == "one"


async def test_more_tokens_than_the_context_has_fill_it(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, "")
    router.script(saying(router.tokenizer.encode("one two"), finish_reason="length"))
    full = await ask(client, max_tokens=32_000, stop_sequences=list("56789"))
    assert full.stop_reason == "model_context_window_exceeded"
    (submit,) = router.submitted
    given = submit.input  # type: ignore[attr-defined]
    assert given.max_tokens == 2048 - len(given.token_ids)


async def test_calls_can_be_forbidden_and_be_one(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, TEXT)
    none = await ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["thinking", "text"]
    assert none.content[1].text.count("<tool_call>") == 2
    one = {"type": "auto", "disable_parallel_tool_use": True}
    single = await ask(client, tools=[WEATHER], tool_choice=one)
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]


async def test_calls_can_be_forced(router: RunningRouter, client: AsyncAnthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        says(router, CALLS.split("\n</tool_call>")[0] + "\n</tool_call>")
        message = await ask(client, tools=[WEATHER], tool_choice=choice)
        assert (message.stop_reason, [b.type for b in message.content]) == (
            "tool_use",
            ["tool_use"],
        )
        assert message.content[0].input == {"city": "Paris"}
        (submit,) = router.submitted
        assert "get_weather" in submit.input.grammar  # type: ignore[attr-defined]


class City(BaseModel):
    city: str


async def test_an_output_format_gives_the_answer_its_form(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, '{"city": "Rome"}')
    parsed = await client.messages.parse(
        model="tiny", max_tokens=50, messages=ASKED, output_format=City
    )
    assert parsed.parsed_output == City(city="Rome")
    (submit,) = router.submitted
    assert "city" in submit.input.grammar  # type: ignore[attr-defined]
    says(router, '{"city": "Rome"}')
    await ask(client, extra_body={"output_format": OF_CITY})
    (submit,) = router.submitted
    assert "city" in submit.input.grammar  # type: ignore[attr-defined]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
NOT_JSON_SCHEMA = {"type": "json_schema", "schema": {"uniqueItems": True}}


OF_CITY = {"type": "json_schema", "schema": SCHEMA}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
CLEAR_USES = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 1},
    "keep": {"type": "tool_uses", "value": 1},
    "exclude_tools": ["get_time"],
}
COMPACT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}


DOCUMENT: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain"}}
PDF: Any = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
}
PLAIN = {"type": "text", "media_type": "text/plain"}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}


def edits(*given: Any) -> dict[str, Any]:
    return {"edits": list(given)}


def used(name: str) -> list[dict[str, Any]]:
    """Returns a turn with thinking, a call and its result."""
    call = {"type": "tool_use", "id": name, "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": name, "content": "4"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    return [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]


LONG: Any = {"messages": [*ASKED, *used("get_weather"), *used("get_time"), *used("get_place")]}


def of_user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "says_what"),
    [
        (of_user(IMAGE), "takes text only"),
        (of_user({**IMAGE, "source": {"type": "url", "url": "http://a/b.png"}}), "not fetched"),
        (of_user({"type": "wings"}), "'wings'"),
        (of_user({"type": "tool_result"}), "tool_use_id"),
        (of_user({"type": "thinking", "thinking": ""}), "in a message of the role user"),
        (of_user(), "content"),
        (of_user({**DOCUMENT, "source": {"type": "url", "url": "http://a/b"}}), "not fetched"),
        (of_user({**DOCUMENT, "source": {"type": "file", "file_id": "f"}}), "not fetched"),
        (of_user(PDF), "application/pdf"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": []}, "messages must be"),
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"temperature": 3}, "temperature must be"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "the request has no tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "the request has no tools"),
        (
            {"tools": [WEATHER, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "no tool with the name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "with the name 'f'"),
        ({"thinking": {"type": "always"}}, "thinking"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs must be"),
        ({"output_config": {"format": NOT_JSON_SCHEMA}}, "output_config cannot"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": OF_CITY}, "output_format": OF_CITY}, "output_format and"),
        ({"context_management": []}, "context_management is not valid"),
        ({"context_management": edits({"type": "clear_all"})}, "'clear_all'"),
        ({"context_management": edits({**KEEP_ALL, "keep": "some"})}, "edits.0"),
        (
            {**LONG, "context_management": edits(KEEP_ALL, CLEAR_USES)},
            "edits.1: clear_tool_uses_20250919 would change",
        ),
        ({**LONG, "context_management": edits(COMPACT)}, "edits.0: compact_20260112 would change"),
        ({"context_management": edits("all")}, "edits.0"),
        ({"thread": "create"}, "thread is not valid"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"thread": {"type": "continue"}}, "needs a previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": 5}}, "thread.previous_message_id"),
    ],
)
async def test_each_refusal_names_the_field(
    router: RunningRouter, client: AsyncAnthropic, body: dict[str, Any], says_what: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        await ask(client, extra_body=body)
    error = raised.value.body
    assert isinstance(error, dict)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert says_what in error["error"]["message"]
    assert not router.submitted


CONTINUE = {"type": "continue", "previous_message_id": "msg_1"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stream": True},
        of_user({"type": "tool_result", "tool_use_id": "of an earlier turn", "content": "4"}),
    ],
)
async def test_a_thread_to_continue_is_not_found(
    router: RunningRouter, client: AsyncAnthropic, body: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.types.ThreadNotFoundError) as raised:
        await ask(client, extra_body={**body, "thread": CONTINUE})
    assert raised.value.details.error_code == "thread_not_found"
    error: Any = raised.value.body
    assert error["error"]["type"] == "not_found_error"
    assert "'msg_1'" in error["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(
            model="tiny", messages=ASKED, extra_body={"thread": CONTINUE}
        )
    assert not router.submitted


async def test_the_clients_threads_replay_the_conversation(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, "Rome.")
    thread = client.beta.messages.thread(model="tiny", max_tokens=50)
    await thread.send({"role": "user", "content": "Paris or Rome?"})
    says(router, "Old.")
    await thread.send({"role": "user", "content": "Why?"})
    prompt = prompt_of(router)
    assert "user\nParis or Rome?<|im_end|>\n<|im_start|>assistant\nRome.<|im_end|>" in prompt
    assert prompt.endswith("user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "form", [{"choice": ["Rome.", "Paris."]}, {"json": {"enum": ["Rome.", "Paris."]}}]
)
async def test_structured_outputs_are_the_form_of_the_answer(
    router: RunningRouter, client: AsyncAnthropic, form: dict[str, Any]
) -> None:
    says(router, '"Rome."')
    await ask(client, extra_body={"structured_outputs": form})
    (submit,) = router.submitted
    assert "Paris." in submit.input.grammar  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"effort": "max", "format": None}}, "output_config.effort"),
        ({"output_config": {"effort": "ultra"}}, "output_config.effort"),
        ({"context_management": edits(KEEP_ALL)}, ""),
        ({"context_management": edits({**KEEP_ALL, "keep": {"type": "all"}})}, ""),
        ({"context_management": edits()}, ""),
        ({"context_management": {}}, ""),
        ({"context_management": edits({"type": "clear_thinking_20251015"})}, ""),
        (
            {"context_management": edits({**CLEAR_USES, "exclude_tools": None})},
            "context_management",
        ),
        ({"context_management": edits({**COMPACT, "trigger": None})}, "context_management"),
        ({"thinking": {"type": "between_tools"}}, ""),
        ({"context_management": edits(KEEP_ALL, CLEAR_USES)}, "context_management"),
        ({"context_management": edits(COMPACT)}, "context_management"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}},
            "thinking.budget_tokens, thinking.display",
        ),
        ({"mcp_servers": []}, ""),
        ({"mcp_servers": [{}], "container": "c"}, "container, mcp_servers"),
        ({"speed": "standard"}, ""),
        ({"speed": "fast"}, "speed"),
    ],
)
async def test_hints_change_nothing_and_are_named(
    router: RunningRouter, client: AsyncAnthropic, body: dict[str, Any], named: str
) -> None:
    says(router, "Rome.")
    await ask(client)
    plain = prompt_of(router)
    says(router, "Rome.")
    raw = await client.messages.with_raw_response.create(
        model="tiny", max_tokens=9, messages=ASKED, extra_body=body
    )
    warning = f'299 tandem "fields without effect: {named}"' if named else None
    assert raw.headers.get("warning") == warning
    assert prompt_of(router) == plain


async def test_what_has_no_effect_is_named(router: RunningRouter, client: AsyncAnthropic) -> None:
    for stream in (False, True):
        says(router, "Rome.")
        body = {
            "thread": {"type": "create"},
            "output_config": {"wings": {}},
            "context_management": {"wings": {}},
            "stream": stream,
        }
        raw = await client.messages.with_raw_response.create(
            model="tiny", max_tokens=9, messages=ASKED, extra_body=body
        )
        assert raw.headers["warning"] == (
            '299 tandem "unknown fields of the request are ignored: output_config.wings, '
            'context_management.wings", '
            '299 tandem "fields without effect: thread"'
        )


async def test_what_anthropics_servers_did_is_left_out(router: RunningRouter) -> None:
    says(router, "Rome.")
    history = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
                {"type": "text", "text": "Rome?", "citations": [{"type": "char_location"}]},
            ],
        },
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        *ASKED,
    ]
    body = {"model": "tiny", "messages": history, "tools": [SEARCH, WEATHER]}
    for path, more in (("/v1/messages", {"max_tokens": 9}), ("/v1/messages/count_tokens", {})):
        answer = await router.http.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        assert answer.headers["warning"] == (
            '299 tandem "parts of the request are left out: '
            "tools.web_search_20250305.web_search, messages.redacted_thinking, "
            "messages.server_tool_use, messages.web_search_tool_result, messages.fallback, "
            'messages.citations"'
        )
    prompt = prompt_of(router)
    assert prompt.count("<|im_start|>assistant\nRome?<|im_end|>") == 1
    assert prompt.count("<|im_start|>assistant") == 2
    assert "get_weather" in prompt


async def test_tools_are_found_and_change_within_a_conversation(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    search: Any = {"name": "search", "input_schema": {"type": "object"}}
    clock: Any = {"name": "get_time", "input_schema": {"type": "object"}}
    found = [{"type": "tool_reference", "tool_name": "get_weather"}]
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": clock}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "search"}},
        {"type": "text", "text": "Go on."},
    ]
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
        {"role": "system", "content": changes},
    ]
    messages[1]["content"][0]["input"] = {}
    messages[2]["content"][0]["content"] = found
    says(router, CALLS.replace("get_weather", "get_time"))
    message = await ask(client, messages=messages, tools=[search, {**WEATHER, "strict": None}])
    assert message.content[0].name == "get_time"
    prompt = prompt_of(router)
    assert '{"name": "get_time", "parameters": {"type": "object"}}' in prompt
    assert "The tool get_weather is available." in prompt
    assert "The tool get_time is now available." in prompt
    assert "The tool search is no longer available." in prompt


async def test_images_and_files_in_the_results_of_tools_are_left_out(
    router: RunningRouter,
) -> None:
    says(router, "Hi!")
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    text = {"type": "document", "source": {**PLAIN, "data": "Read me."}}
    page = {"type": "browser_state", "tabs": []}
    called = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
    history = [
        *ASKED,
        {"role": "assistant", "content": [called]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [image, PDF, text, page]}
            ],
        },
    ]
    answer = await router.http.post(
        "/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": history}
    )
    assert answer.status_code == 200, answer.text
    for kind in ("image", "document", "browser_state"):
        assert f"messages.tool_result.{kind}" in answer.headers["warning"]
    read = "Read me.\n(An image was left out here.)\n(A file was left out here.)"
    assert read in prompt_of(router)


async def test_thinking_of_earlier_turns_is_cleared() -> None:
    """Claude Code sends this edit after an hour without a request."""
    thought = {"type": "thinking", "thinking": "Ah.", "signature": ""}
    said = {"role": "assistant", "content": [thought]}
    turns = [*ASKED, *used("get_weather"), said, *ASKED, *used("get_time"), *used("get_place")]
    for value, first in ((1, ""), (2, "Hm.")):
        keep = {"type": "thinking_turns", "value": value}
        edit = {"type": "clear_thinking_20251015", "keep": keep}
        body = {"max_tokens": 9, "messages": turns, "context_management": edits(edit)}
        (request,) = parse_messages(body, "x").requests
        assert isinstance(request.prompt, Conversation)
        answers = [m for m in request.prompt.messages if m.role == "assistant"]
        kept = [first, "Ah." if first else "", "Hm.", "Hm."]
        assert [answer.reasoning for answer in answers] == kept


async def test_max_tokens_0_caches_the_prompt_alone(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    says(router, "Rome.")
    message = await ask(client, max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    assert prompt_of(router).endswith("<|im_start|>assistant\n")


async def test_null_means_absent_in_every_part(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": None}
    result = {"type": "tool_result", "tool_use_id": "t", "content": None, "is_error": None}
    says(router, CALLS)
    message = await ask(
        client,
        messages=[
            *ASKED,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        tools=[{**WEATHER, "input_schema": {**SCHEMA, "required": None}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": None},
    )
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("levels", [300, 700, 850, 900, 950, 980, 990, 1000, 1100])
async def test_no_depth_of_a_body_is_an_error_of_the_router(
    router: RunningRouter, levels: int
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    schema = {"type": "json_schema", "schema": "DEEP"}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": "DEEP"}}
    function = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
    tool = {"name": "f", "input_schema": "DEEP"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("messages", {**chat, "max_tokens": 9, "output_config": {"format": schema}}),
        ("messages", {**chat, "max_tokens": 9, "tools": [tool], "tool_choice": {"type": "any"}}),
        ("chat/completions", {**chat, "response_format": named}),
        ("chat/completions", {**chat, "guided_json": "DEEP"}),
        ("chat/completions", {**chat, "tools": [function], "tool_choice": "required"}),
        ("responses", {"input": "x", "text": {"format": {**schema, "name": "x"}}}),
    ]
    for path, body in bodies:
        deep = '{"a":' * levels + "{}" + "}" * levels
        sent = json.dumps({"model": "tiny", **body}).replace('"DEEP"', deep)
        answer = await router.http.post(
            f"/v1/{path}", content=sent, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, (path, answer.text)


BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1a2; x=y;"}


async def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    own: Any = {"type": "text", "text": "Be brief."}
    says(router, "Rome.")
    await ask(client, system=[own])
    plain = prompt_of(router)
    says(router, "Rome.")
    raw = await client.messages.with_raw_response.create(
        model="tiny", max_tokens=9, messages=ASKED, system=[BILLING, own]
    )
    assert prompt_of(router) == plain
    assert "warning" not in raw.headers
    counts = [
        (await client.messages.count_tokens(model="tiny", messages=ASKED, system=system))
        for system in ([own], [BILLING, own])
    ]
    assert counts[0].input_tokens == counts[1].input_tokens
    for system in (
        [own, BILLING],  # only the first block
        [BILLING, BILLING, own],  # once
        [{**BILLING, "text": " " + BILLING["text"]}],  # exactly this beginning
        BILLING["text"],  # a block of its own
    ):
        says(router, "Rome.")
        await ask(client, system=system)
        assert prompt_of(router).count("x-anthropic-billing-header") == 1


async def test_documents_are_text(router: RunningRouter) -> None:
    text = base64.b64encode(b"from a file").decode()
    file = {"type": "base64", "media_type": "text/plain", "data": text}
    parts = {"type": "content", "content": [{"type": "text", "text": "in parts"}]}
    found = {"type": "search_result", "source": "http://a", "title": "A", "content": "found"}
    found["content"] = [{"type": "text", "text": "found"}]  # type: ignore[assignment]
    blocks = [
        {"type": "document", "title": "T", "context": "C", "source": {**PLAIN, "data": "plain"}},
        {"type": "document", "source": file},
        {"type": "document", "source": parts, "citations": {"enabled": True}},
        found,
        {"type": "tool_result", "tool_use_id": "a", "content": [{**DOCUMENT, "source": file}]},
    ]
    says(router, "Yes.")
    body = {"model": "tiny", "max_tokens": 9, **of_user(*blocks)}
    answer = await router.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"].endswith('left out: messages.citations"')
    prompt = prompt_of(router)
    for text in ("T\nC\nplain", "\nfrom a file", "in parts", "A\nhttp://a\nfound"):
        assert text in prompt
    assert "<tool_response>\nfrom a file" in prompt


@pytest.mark.parametrize(
    ("text", "max_tokens"),
    [
        (TEXT, 400),
        ("<think>\nTwo cities.", 400),
        ("<think>\nTwo cities, or", 5),
        (TEXT, 42),
        ("", 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_can_be_sent_back_wherever_it_was_cut(
    router: RunningRouter, client: AsyncAnthropic, text: str, max_tokens: int, stream: bool
) -> None:
    says(router, text)
    asked = {"tools": [WEATHER], "max_tokens": max_tokens}
    if stream:
        async with client.messages.stream(model="tiny", messages=ASKED, **asked) as events:  # type: ignore[arg-type]
            said = await events.get_final_message()
    else:
        said = await ask(client, **asked)
    for after in (ASKED, []):
        says(router, "Yes.")
        history = [*ASKED, said.to_param(), *after]
        await ask(client, messages=history, tools=[WEATHER])


async def test_errors_have_anthropics_form_and_status(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(client, model="claude")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum"):
        await ask(client, messages=[{"role": "user", "content": "a b " * 3000}])
    router.script(refusing("queue_full", 3.0))
    with pytest.raises(anthropic.APIStatusError) as full:
        await ask(client)
    assert full.value.status_code == 529
    assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert int(full.value.response.headers["retry-after"]) >= 1
    for method, path, status in (
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/messages/batches", 404),
        ("POST", "/v1/messages", 415),
    ):
        headers = {"content-type": "text/plain"}
        answer = await router.http.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")


async def test_an_error_in_mid_stream_is_an_event(
    router: RunningRouter, client: AsyncAnthropic
) -> None:
    async def breaks(submit: Any, say: Any) -> None:
        say(update(submit, [router.tokenizer.encode("Hi")[0]]))
        say(refusal(submit, "internal_error"))

    router.script(breaks)
    stream = await ask(client, stream=True)
    seen = []

    async def follow() -> None:
        async for event in stream:
            seen.append(event.type)

    with pytest.raises(anthropic.APIStatusError) as raised:
        await follow()
    assert seen[0] == "message_start"
    assert "message_stop" not in seen
    assert raised.value.body["error"]["type"] == "api_error"  # type: ignore[index]


async def test_unknown_fields_are_named(router: RunningRouter, client: AsyncAnthropic) -> None:
    says(router, "Hi!")
    raw = await client.messages.with_raw_response.create(
        model="tiny",
        max_tokens=9,
        messages=ASKED,
        metadata={"user_id": "me"},
        extra_body={"wings": 2},
    )
    assert raw.headers["warning"] == '299 tandem "unknown fields of the request are ignored: wings"'


async def test_openapi_has_the_bodies(router: RunningRouter) -> None:
    document = (await router.http.get("/openapi.json")).json()
    openapi_spec_validator.validate(document)
    assert {"MessagesBody", "CountTokensBody", "ToolResultBlock"} <= document["components"][
        "schemas"
    ].keys()


async def test_models_are_told_in_anthropics_form(client: AsyncAnthropic) -> None:
    (model,) = [one async for one in client.models.list()]
    assert isinstance(model, anthropic.types.ModelInfo)
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 2048)
    assert model.created_at.year >= 2024
    assert await client.models.retrieve("tiny") == model
    with pytest.raises(anthropic.NotFoundError) as raised:
        await client.models.retrieve("other")
    body: Any = raised.value.body
    assert body["error"]["type"] == "not_found_error"
