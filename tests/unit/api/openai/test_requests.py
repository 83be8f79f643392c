from __future__ import annotations

import base64
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tandem.api.anthropic.requests import MessagesBody
from tandem.api.openai.fields import CHAT_POLICY, COMPLETION_POLICY, FieldPolicy, warn
from tandem.api.openai.parsed import ParsedRequest
from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import (
    ChatBody,
    CompletionBody,
    drop_unknown_fields,
    hints_in,
    parse_chat,
    parse_completion,
)
from tandem.api.responses.requests import ResponsesBody
from tandem.errors import BadRequest
from tandem.router.request.allowed import ALLOWED, CHOICES_MAX
from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.delta import Delta, Usage

HELLO = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> ParsedRequest:
    return parse_completion({"prompt": "x", **body}, "id")


def chat(**body: Any) -> ParsedRequest:
    return parse_chat({"messages": HELLO, **body}, "id")


def refused(body: dict[str, Any], *, chats: bool = False) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        (parse_chat if chats else parse_completion)(body, "id")
    return raised.value


def test_everything_supported_arrives() -> None:
    parsed = completion(
        model="m",
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    request = parsed.requests[0]
    sampling = parsed.requests[0].sampling
    assert (request.model, request.prompt, sampling.max_tokens) == ("m", "x", 9)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 3)
    assert (sampling.min_p, sampling.seed) == (0.1, 7)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (["a", "b"], [4], True)
    assert (parsed.stream, parsed.include_usage, parsed.return_token_ids) == (True, True, True)


def test_defaults() -> None:
    request = completion().requests[0]
    assert (request.sampling.max_tokens, request.default_max_tokens) == (None, 16)
    assert request.sampling.temperature == 1
    assert chat().requests[0].default_max_tokens is None
    assert completion(stop="one").requests[0].sampling.stop_strings == ["one"]
    assert completion(prompt=[1, 2]).requests[0].prompt == (1, 2)


def test_null_means_missing() -> None:
    names = ("temperature", "seed", "stop", "stream", "stream_options", "max_tokens", "logprobs")
    assert completion(**dict.fromkeys(names)).requests[0].sampling.temperature == 1


def test_chat_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": [], "refusal": "", "wings": 2},
    ]
    wanted = (
        Message("system", "be brief", name="boss"),
        Message("user", "a\nb"),
        Message("assistant", "c"),
    )
    assert chat(messages=messages).requests[0].prompt == Conversation(wanted)
    assert chat(max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_tokens=5).requests[0].sampling.max_tokens == 5


BAD_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", 5),
    ("prompt", True),
    ("prompt", [True]),
    ("prompt", [1.5]),
    ("prompt", ["a", 1]),
    ("prompt", [[1], [True]]),
    ("prompt", {"a": 1}),
    ("model", 5),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("top_k", 1.5),
    ("seed", "1"),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["a"]),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"nonsense": True}),
    ("return_token_ids", 1),
    ("presence_penalty", "0"),
    ("frequency_penalty", [0]),
    ("repetition_penalty", True),
    ("logit_bias", [1]),
    ("logit_bias", {"5": "much"}),
    ("logit_bias", {"five": 1}),
    ("min_tokens", 1.5),
    ("bad_words", "word"),
    ("prompt_logprobs", True),
    ("truncate_prompt_tokens", "all"),
]


@pytest.mark.parametrize(("name", "value"), BAD_COMPLETIONS)
def test_wrong_types_name_the_field_and_what_is_allowed(name: str, value: Any) -> None:
    error = refused({"prompt": "x", name: value})
    assert error.param == name
    assert ALLOWED[name] in error.message


def test_keywords_of_a_tools_schema_that_are_null_are_absent() -> None:
    """Servers of tools that are written in Go send them, and chat templates fail."""
    kept = {"default": None, "enum": [None, "x"], "type": ["string", "null"]}
    for sent, read in (
        ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
        ({"properties": {"a": {**kept, "format": None}}}, {"properties": {"a": kept}}),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": sent}}
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
        (request,) = parse_chat(body, "id").requests
        assert isinstance(request.prompt, Conversation)
        assert request.prompt.tools[0]["function"]["parameters"] == read
    bare = {"type": "function", "function": {"name": "f"}}
    (request,) = parse_chat({**body, "tools": [bare]}, "id").requests
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.tools == (bare,)


def test_an_image_may_be_the_url_alone() -> None:
    parts = [
        {"type": "image_url", "image_url": url}
        for url in ("data:image/png;base64,AAAA", {"url": "data:image/png;base64,AAAA"})
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    (request,) = parse_chat(body, "id").requests
    assert isinstance(request.prompt, Conversation)
    first, second = request.prompt.images
    assert first == second


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [],
        [5],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}],
    ],
)
def test_bad_messages(messages: Any) -> None:
    error = refused({"messages": messages}, chats=True)
    assert error.param == "messages"
    assert ALLOWED["messages"] in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"id": "a"}),
        ("function_call", {"name": "f", "arguments": "{}"}),
    ],
)
def test_parts_of_messages_pass_while_they_are_empty(name: str, value: Any) -> None:
    said = {"role": "assistant", "content": "x"}
    for empty in (None, type(value)()):
        chat(messages=[*HELLO, {**said, name: empty}])
    error = refused({"messages": [*HELLO, {**said, name: value}]}, chats=True)
    assert error.param == "messages"
    assert f"messages.1.{name}: the field is not supported" in error.message


def test_an_answer_goes_back_into_the_conversation() -> None:
    """The openai package dumps a message with every key that it may have."""
    asked = chat()
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    whole = Replies(asked, "m").whole([[Delta("hi", [5], usage, "stop", total=usage)]])
    said = ChatCompletion.model_validate(whole).choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= said.keys()
    prompt = chat(messages=[*HELLO, said]).requests[0].prompt
    assert prompt == Conversation((Message("user", "hello"), Message("assistant", "hi")))


def test_continuous_usage_needs_usage() -> None:
    def told(**options: bool) -> tuple[bool, bool]:
        parsed = completion(stream=True, stream_options=options)
        return parsed.include_usage, parsed.continuous_usage

    assert told(include_usage=True, continuous_usage_stats=True) == (True, True)
    assert told(include_usage=True, continuous_usage_stats=False) == (True, False)
    assert told(continuous_usage_stats=True) == (False, False)


def test_both_limits_are_ambiguous() -> None:
    body = {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 1}
    assert refused(body, chats=True).param == "max_tokens"


NOTHING: list[Any] = [None, False, "", [], {}]


def not_of(kind: type[ChatBody | CompletionBody], table: Any) -> list[tuple[bool, str]]:
    return [(kind is ChatBody, name) for name in sorted(table) if name not in kind.supported]


@pytest.mark.parametrize(
    ("is_chat", "name"),
    [
        *not_of(ChatBody, CHAT_POLICY.refused),
        *not_of(CompletionBody, COMPLETION_POLICY.refused),
    ],
)
def test_a_refused_field_may_ask_for_nothing(is_chat: bool, name: str) -> None:
    parse, body = (chat, {"messages": HELLO}) if is_chat else (completion, {"prompt": "x"})
    for neutral in (*NOTHING, *CHAT_POLICY.refused[name]):
        parse(**{name: neutral})
    error = refused({**body, name: ["something else"]}, chats=is_chat)
    assert error.param == name
    assert "not supported" in error.message
    assert "null" in error.message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((ChatBody, name) for name in CHAT_POLICY.hints),
        *((CompletionBody, name) for name in COMPLETION_POLICY.hints),
    ],
)
def test_a_hint_is_accepted_and_named(kind: type[Any], name: str) -> None:
    is_chat = kind is ChatBody
    parse, body = (chat, {"messages": HELLO}) if is_chat else (completion, {"prompt": "x"})
    for value in ("something", 5, ["x"], {"a": "b"}, True):
        if value in kind.field_policy.hints[name]:
            continue
        parse(**{name: value})
        assert hints_in(kind, {**body, name: value}) == [name]
    for nothing in (*NOTHING, *kind.field_policy.hints[name]):
        assert hints_in(kind, {**body, name: nothing}) == []
    assert drop_unknown_fields(kind, {**body, name: 5}) == []


def test_a_field_has_one_kind() -> None:
    for policy in (CHAT_POLICY, COMPLETION_POLICY):
        names = [*policy.records, *policy.hints]
        assert len(names) == len(set(names))
        assert not policy.records & policy.refused.keys()


def test_hints_of_nested_objects_are_named() -> None:
    assert FieldPolicy().hints_in({"a": 1}) == []
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    assert hints_in(ChatBody, body) == []


def test_a_number_is_not_taken_for_a_boolean() -> None:
    assert refused({"prompt": "x", "n": True}).param == "n"
    assert refused({"messages": HELLO, "logprobs": 0}, chats=True).param == "logprobs"
    completion(presence_penalty=0, frequency_penalty=0.0, n=1)


def test_bookkeeping_passes_and_unknown_fields_do_not() -> None:
    completion(user="me", metadata={"a": "b"}, service_tier="auto")
    error = refused({"prompt": "x", "y" * 500: 1})
    assert error.param == "y" * 80
    assert "temperature" in error.message
    # Of the other endpoint.
    assert refused({"prompt": "x", "messages": HELLO}).param == "messages"


def test_unknown_fields_are_taken_out_and_named() -> None:
    body = {"prompt": "x", "wings": 2, "n": 1, "user": "me", "stream_options": {"speed": 1}}
    assert drop_unknown_fields(CompletionBody, body) == ["wings", "stream_options.speed"]
    assert body == {"prompt": "x", "n": 1, "user": "me", "stream_options": {}}
    # A known field that is not supported is not unknown.
    asks = {"messages": HELLO, "modalities": ["audio"], "regex": "a"}
    assert drop_unknown_fields(ChatBody, asks) == []
    assert refused(asks, chats=True).param == "modalities"


def test_the_warning_is_short_and_plain_whatever_was_sent() -> None:
    headers: dict[str, str] = {}
    warn(headers, "fields are ignored", [])
    assert headers == {}
    warn(headers, "fields are ignored", ["wings"])
    warn(headers, "tools are ignored", ["x"])
    assert headers == {
        "warning": '299 tandem "fields are ignored: wings", 299 tandem "tools are ignored: x"'
    }
    del headers["warning"]
    warn(headers, "fields are ignored", ['a"\r\nset-cookie: x', "é" * 500, *map(str, range(20))])
    text = headers["warning"]
    assert text.isascii()
    assert text.isprintable()
    assert text.count('"') == 2
    assert text.endswith('5, and 14 more"')
    assert len(text) < 200


@pytest.mark.parametrize("kind", ["input_audio", "video_url"])
def test_a_part_that_is_neither_text_nor_image_is_named(kind: str) -> None:
    parts = [{"type": "text", "text": "what is it?", "cache_control": {}}, {"type": kind, kind: {}}]
    error = refused({"messages": [*HELLO, {"role": "user", "content": parts}]}, chats=True)
    assert error.param == "messages"
    where = f"messages.1.content: part 1 has the type '{kind}'; allowed are text, image_url, file"
    assert where in error.message


def test_how_the_prompt_of_a_chat_ends() -> None:
    def conversation(**flags: bool) -> Conversation:
        prompt = chat(**flags).requests[0].prompt
        assert isinstance(prompt, Conversation)
        return prompt

    assert conversation().add_generation_prompt
    assert not conversation(add_generation_prompt=False).continue_final_message
    continuing = conversation(continue_final_message=True)
    assert continuing == conversation(add_generation_prompt=False, continue_final_message=True)
    assert not continuing.add_generation_prompt
    both = {"add_generation_prompt": True, "continue_final_message": True}
    error = refused({"messages": HELLO, **both}, chats=True)
    assert error.param == "add_generation_prompt"
    assert not completion(add_special_tokens=False).requests[0].add_special_tokens
    assert conversation(add_special_tokens=True).add_special_tokens


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        (["one string"], ["one string"]),
        ([[5, 6]], [(5, 6)]),
        ([5], [(5,)]),
        (["a", "b", "a"], ["a", "b", "a"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["x"] * CHOICES_MAX, ["x"] * CHOICES_MAX),
    ],
)
def test_each_prompt_of_a_list_is_a_request_of_its_own(sent: Any, prompts: Any) -> None:
    parsed = parse_completion({"prompt": sent, "seed": 3, "max_tokens": 7}, "r")
    assert [r.prompt for r in parsed.requests] == prompts
    ids = ["r"] if len(prompts) == 1 else [f"r-{i}" for i in range(len(prompts))]
    assert [r.request_id for r in parsed.requests] == ids
    assert parsed.request_id == "r"
    assert {(r.sampling.seed, r.sampling.max_tokens) for r in parsed.requests} == {(3, 7)}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (["x"] * (CHOICES_MAX + 1), "a list of at most 128 such prompts"),
        (["a", 5], "(prompt.1: "),
        ([[1], [2, "x"]], "(prompt.1.1: Input should be a valid integer)"),
        (["a", "b", ""], "prompt 2 (from 0): prompt must be a non-empty string"),
        ([[1], []], "prompt 1 (from 0): prompt must be"),
        ([[[1]]], "(prompt.0: "),
    ],
)
def test_one_bad_prompt_is_named(sent: Any, says: str) -> None:
    error = refused({"prompt": sent})
    assert error.param == "prompt"
    assert says in error.message
    assert "prompt.str" not in error.message  # a name of the validator's


def test_what_is_no_prompt_of_several_names_none() -> None:
    assert refused({"prompt": ["a", "b"], "max_tokens": 0}).message.startswith("max_tokens must be")


def test_log_probabilities_are_asked_for_as_each_endpoint_does() -> None:
    assert completion().requests[0].sampling.logprobs is None
    assert completion(logprobs=False).requests[0].sampling.logprobs is None
    assert completion(logprobs=0).requests[0].sampling.logprobs == 0
    assert completion(logprobs=5).requests[0].sampling.logprobs == 5
    assert chat().requests[0].sampling.logprobs is None
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).requests[0].sampling.logprobs == 20
    echoed = completion(logprobs=2, prompt_logprobs=1, echo=True)
    assert (echoed.requests[0].sampling.prompt_logprobs, echoed.prompt_logprobs) == (2, 1)
    assert completion(echo=True).requests[0].sampling.prompt_logprobs is None
    assert refused({"prompt": "x", "logprobs": 21}).param == "logprobs"
    for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        assert refused({"messages": HELLO, **wrong}, chats=True).param == "top_logprobs"
    assert refused({"prompt": "x", "prompt_logprobs": 0, "stream": True}).param == "prompt_logprobs"
    assert chat(echo=True, logprobs=True).requests[0].sampling.prompt_logprobs is None


def test_edits_and_forms_of_text_arrive() -> None:
    request = completion(
        presence_penalty=0.5,
        frequency_penalty=-2,
        repetition_penalty=1.5,
        logit_bias={"7": 3},
        min_tokens=2,
        bad_words=["no"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=-1,
    ).requests[0]
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -2)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.5, 2)
    assert (dict(sampling.logit_bias), list(sampling.bad_words)) == ({7: 3.0}, ["no"])
    assert sampling.include_stop_str_in_output
    assert not sampling.skip_special_tokens
    assert sampling.truncate_prompt_tokens == -1


def text_file(text: bytes, media_type: str = "text/plain") -> str:
    return f"data:{media_type};base64,{base64.b64encode(text).decode()}"


def test_files_of_text_are_text() -> None:
    for file, text in (
        ({"file_data": text_file(b"a = 1"), "filename": "a.py"}, "a.py\na = 1"),
        ({"file_data": text_file("\u00fc".encode(), "application/json")}, "\u00fc"),
        ({"file_data": base64.b64encode(b"plain").decode()}, "plain"),
    ):
        parts = [{"type": "file", "file": file}, {"type": "text", "text": "What is it?"}]
        prompt = chat(messages=[{"role": "user", "content": parts}]).requests[0].prompt
        assert isinstance(prompt, Conversation)
        assert prompt.messages[0].content == f"{text}\nWhat is it?"


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ({"file_data": text_file(b"%PDF", "application/pdf")}, "application/pdf"),
        ({"file_data": text_file(b"\xff")}, "text in UTF-8"),
        ({"file_data": text_file(b"a\0b")}, "text in UTF-8"),
        ({"file_data": "data:text/plain;base64,%%%"}, "text in UTF-8"),
        ({"file_id": "file-1"}, "must be sent in file_data"),
        ({}, "must be sent in file_data"),
    ],
)
def test_other_files_are_refused(file: dict[str, str], why: str) -> None:
    parts = [{"type": "file", "file": file}]
    error = refused({"messages": [{"role": "user", "content": parts}]}, chats=True)
    assert error.param == "messages"
    assert why in error.message


def test_what_a_server_may_drop_is_dropped_and_named() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    said = {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]}
    body: dict[str, Any] = {
        "messages": [*HELLO, said, {**said, "refusal": "no", "annotations": []}, 5],
        "tools": [function, {"type": "web_search"}, {"type": "mcp", "name": "m"}, 5],
    }
    dropped = ChatBody.leave_out(body)
    assert dropped == [
        "tools.web_search",
        "tools.mcp.m",
        "messages.annotations",
        "messages.refusal",
    ]
    assert body["tools"] == [function, 5]
    plain = {"role": "assistant", "content": "x"}
    assert body["messages"] == [*HELLO, plain, plain, 5]
    for wrong in ({"tools": 5, "messages": 5}, {}, {"tools": [None], "messages": [None]}):
        assert ChatBody.leave_out(dict(wrong)) == []


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": "Yes.", "refusal": "No."}, "Yes."),
    ],
)
def test_a_refusal_is_what_the_assistant_said(said: dict[str, Any], content: str) -> None:
    prompt = chat(messages=[*HELLO, {"role": "assistant", **said}]).requests[0].prompt
    assert isinstance(prompt, Conversation)
    assert prompt.messages[1].content == content


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": '{"a": "b'}}, {"arguments": '{"a": "b'}),
        ({"function": {"name": "f", "arguments": None}, "type": None, "id": None}, {}),
        ({"custom": {"name": "f", "input": "x"}, "type": "custom", "id": "c"}, {"input": "x"}),
    ],
)
def test_calls_of_earlier_answers(call: dict[str, Any], arguments: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = chat(messages=[*HELLO, said]).requests[0].prompt
    assert isinstance(prompt, Conversation)
    (found,) = prompt.messages[1].tool_calls
    assert (found.name, found.arguments) == ("f", arguments)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_no_field_of_a_nested_object_is_unknown(kind: type[Any]) -> None:
    for part, its_kind in kind.parts.items():
        sent = {field.alias or name: "x" for name, field in its_kind.model_fields.items()}
        assert drop_unknown_fields(kind, {part: dict(sent)}) == []
        assert sent.keys() == its_kind.supported
