"""Clients say what is to be done for their KV: the allowed values, and what workers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tandem.api.anthropic.replies import usage_body
from tandem.api.anthropic.requests import parse_messages
from tandem.api.grpc.inference import parse_request
from tandem.api.openai.requests import parse_chat, parse_completion, validate
from tandem.api.responses.requests import ResponsesBody, parse_response
from tandem.common.retention import NO_RETENTION, Retention
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.net.security.limits import NO_LIMITS, Limits, changed
from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.delta import Usage
from tandem.router.request.request import ClientRequest
from tandem.router.request.session import SESSION_HEADERS, session_in_user_id, session_of

USER = {"role": "user", "content": "Hello!"}
MARK = {"type": "ephemeral"}


def openai_retention(**fields: Any) -> Retention:
    (request,) = parse_chat({"messages": [USER], **fields}, "id").requests
    (completion,) = parse_completion({"prompt": "Hello!", **fields}, "id").requests
    key = fields.get("prompt_cache_key")
    kept = fields.get("prompt_cache_retention")
    message = pb.GenerateRequest(
        text="Hello!",
        prompt_cache_key=key or "",
        prompt_cache_retention=kept or "",
        kv_priority=fields.get("kv_priority"),
    )
    over_grpc = parse_request(message.SerializeToString())
    assert request.retention == completion.retention == over_grpc.retention
    return request.retention


def test_openais_retentions() -> None:
    assert openai_retention() == NO_RETENTION
    assert openai_retention(prompt_cache_key="chat 7") == Retention(returns=True)
    assert openai_retention(prompt_cache_retention="in_memory").pin_s == 300
    assert openai_retention(prompt_cache_retention="in-memory").pin_s == 300
    assert openai_retention(prompt_cache_retention="24h").pin_s == 86_400


@pytest.mark.parametrize("priority", [0, 35, 100])
def test_every_api_takes_a_priority(priority: int) -> None:
    assert openai_retention(kv_priority=priority) == Retention(priority=priority)
    response = validate(ResponsesBody, {"input": "Hello!", "kv_priority": priority})
    (of_response,) = parse_response(response, (), "id").chat.requests
    assert of_response.retention == Retention(priority=priority)
    asked = {"messages": [USER], "max_tokens": 5, "kv_priority": priority, "cache_control": MARK}
    (message,) = parse_messages(asked, "id").requests
    assert message.retention == Retention(pin_s=300.0, priority=priority)
    assert openai_retention(kv_priority=None).priority == 35


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("prompt_cache_retention", "1h", "in_memory or 24h"),
        ("prompt_cache_retention", 24, "in_memory or 24h"),
        ("prompt_cache_key", "x" * 1025, "at most 1024 characters"),
        ("prompt_cache_key", 7, "at most 1024 characters"),
        ("kv_priority", -1, r"an integer from 0 \(evicted first\) to 100; it is -1"),
        ("kv_priority", 101, "to 100; it is 101"),
        ("kv_priority", 35.5, r"an integer from 0 \(evicted first\) to 100"),
        ("kv_priority", True, r"an integer from 0 \(evicted first\) to 100"),
        ("kv_priority", "high", r"an integer from 0 \(evicted first\) to 100"),
    ],
)
def test_other_values_are_refused(field: str, value: object, allowed: str) -> None:
    with pytest.raises(BadRequest, match=allowed) as caught:
        parse_chat({"messages": [USER], field: value}, "id")
    assert caught.value.param == field


def test_grpc_refuses_other_values() -> None:
    message = pb.GenerateRequest(text="x", prompt_cache_retention="forever")
    with pytest.raises(BadRequest, match="in_memory or 24h; it is 'forever'"):
        parse_request(message.SerializeToString())
    message = pb.GenerateRequest(text="x", kv_priority=101)
    with pytest.raises(BadRequest, match="to 100; it is 101"):
        parse_request(message.SerializeToString())


def marked(**body: Any) -> float:
    asked = {"messages": [USER], "max_tokens": 5, **body}
    return parse_messages(asked, "id").requests[0].retention.pin_s


def test_the_longest_mark_anywhere_in_a_message_counts() -> None:
    hour = {**MARK, "ttl": "1h"}
    text = {"type": "text", "text": "x"}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t"}
    assert marked() == 0
    assert marked(cache_control=MARK) == 300
    assert marked(system=[{**text, "cache_control": hour}], cache_control=MARK) == 3600
    assert marked(tools=[{**tool, "cache_control": hour}]) == 3600
    assert marked(messages=[{"role": "user", "content": [{**text, "cache_control": hour}]}]) == 3600
    for content, expected in (
        ([{**result, "cache_control": MARK}], 300),
        ([{**result, "content": [{**text, "cache_control": hour}]}], 3600),
    ):
        history = [USER, {"role": "assistant", "content": [use]}, {"role": "user"}]
        history[-1]["content"] = content
        assert marked(messages=history, tools=[tool]) == expected


def pinned(**body: Any) -> list[tuple[str, str | None]] | None:
    """Returns the messages of the part that is pinned; None: all is, or nothing."""
    asked = {"messages": [USER], "max_tokens": 5, **body}
    chat = parse_messages(asked, "id").requests[0].pinned_chat
    return chat and [(message.role, message.content) for message in chat.messages]


def test_what_is_before_the_last_mark_is_pinned() -> None:
    one, two = ({"type": "text", "text": text} for text in ("one", "two"))
    marked_one = {**one, "cache_control": MARK}
    assert pinned() is None
    assert pinned(cache_control=MARK, system=[marked_one]) is None
    assert pinned(system=[marked_one, two]) == [("system", "onetwo"), ("user", "")]
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}
    assert pinned(tools=[tool]) == [("user", "")]
    asks = {"role": "user", "content": [marked_one, two]}
    says = {"role": "assistant", "content": "yes"}
    ends = {"role": "user", "content": [two]}
    begun = [("user", "one\ntwo"), ("assistant", "yes")]
    assert pinned(messages=[asks, says, ends]) == [("user", "one")]
    assert pinned(messages=[asks, says, {**ends, "content": [marked_one, two]}]) == [
        *begun,
        ("user", "one"),
    ]


@pytest.mark.parametrize(
    "mark",
    [{"type": "ephemeral", "ttl": "2h"}, {"type": "lasting"}, {"ttl": "5m"}],
)
def test_marks_of_other_kinds_are_refused(mark: Mapping[str, object]) -> None:
    text = {"type": "text", "text": "x", "cache_control": mark}
    with pytest.raises(BadRequest, match="cache_control"):
        marked(system=[text])
    with pytest.raises(BadRequest, match='"ephemeral" and a ttl of "5m" or "1h"'):
        marked(cache_control=mark)


def test_the_scope_of_a_mark_has_no_effect() -> None:
    """Claude Code sends it."""
    text = {"type": "text", "text": "x", "cache_control": {**MARK, "scope": "global"}}
    without = {"type": "text", "text": "x", "cache_control": MARK}
    assert marked(system=[text]) == marked(system=[without])


def test_a_mark_says_which_of_its_fields_is_wrong() -> None:
    text = {"type": "text", "text": "x", "cache_control": {**MARK, "ttl": "2h"}}
    with pytest.raises(BadRequest, match=r"cache_control\.ttl: .*'5m' or '1h'"):
        marked(messages=[{"role": "user", "content": [text]}])


def test_anthropics_usage_tells_what_was_read_and_what_was_created() -> None:
    usage = Usage(100, 5, 32, storable_tokens=96)
    plain = usage_body(usage)
    assert (plain["input_tokens"], plain["cache_creation_input_tokens"]) == (68, 0)
    for pin_s, parts in ((300.0, (64, 0)), (3600.0, (0, 64))):
        body = usage_body(usage, pin_s)
        told = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert [body[name] for name in told] == [4, 64, 32]
        assert tuple(body["cache_creation"].values()) == parts
        assert list(body["cache_creation"]) == [
            "ephemeral_5m_input_tokens",
            "ephemeral_1h_input_tokens",
        ]
    assert usage_body(Usage(100, 5, 99, storable_tokens=96), 300.0)["input_tokens"] == 1


def sent(**headers: Sequence[str]) -> Any:
    return lambda name: headers.get(name.replace("-", "_"), ())


def test_headers_name_a_session() -> None:
    assert session_of(sent()) == ""
    assert session_of(sent(x_session_id=["a b"])) == "a b"
    assert session_of(sent(x_session_id=["", "  "])) == ""
    assert session_of(sent(x_session_id=[""], x_correlation_id=["7"])) == "7"
    assert session_of(sent(x_correlation_id=[" 7 ", "8"])) == "7"
    assert session_of(sent(x_correlation_id=["once"], x_claude_code_session_id=["s"])) == "s"
    for name in SESSION_HEADERS:
        assert session_of(lambda asked, name=name: ["s"] if asked == name else []) == "s"  # type: ignore[misc]


@pytest.mark.parametrize("value", ["x" * 257, "ä", "a\x00b"])
def test_a_header_that_names_no_session_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="x-session-id must have 1 to 256 printable"):
        session_of(sent(x_session_id=[value]))


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_9f_account_4e-1_session_7c2d-11", "7c2d-11"),
        ('{"device_id": "9f", "session_id": "7c2d-11"}', "7c2d-11"),
        ("user_9f", ""),
        ("", ""),
        (None, ""),
        (7, ""),
        ('{"session_id": 7}', ""),
        ('{"session_id"', ""),
        ("{" * 500, ""),
        ("user_session_" + "x" * 2000, ""),
    ],
)
def test_claude_code_names_its_session_in_the_user_id(user_id: object, session: str) -> None:
    assert session_in_user_id(user_id) == session
    asked = {"messages": [USER], "max_tokens": 5, "metadata": {"user_id": user_id}}
    (request,) = parse_messages(asked, "id").requests
    assert request.session == session


@pytest.mark.parametrize("metadata", [None, 7, [], {}, {"user_id": {}}])
def test_other_metadata_of_a_message_is_accepted(metadata: object) -> None:
    asked = {"messages": [USER], "max_tokens": 5, "metadata": metadata}
    (request,) = parse_messages(asked, "id").requests
    assert request.session == ""


def test_a_cache_key_names_a_session_in_every_api_of_openai() -> None:
    for body in (
        parse_chat({"messages": [USER], "prompt_cache_key": "chat 7"}, "id"),
        parse_completion({"prompt": "Hello!", "prompt_cache_key": "chat 7"}, "id"),
    ):
        assert body.requests[0].session == "chat 7"
    response = validate(ResponsesBody, {"input": "Hello!", "prompt_cache_key": "chat 7"})
    assert parse_response(response, (), "id").chat.requests[0].session == "chat 7"
    message = pb.GenerateRequest(text="Hello!", prompt_cache_key="chat 7")
    assert parse_request(message.SerializeToString()).session == "chat 7"


def test_what_a_worker_is_asked_for() -> None:
    weighted = Limits(weight=7)
    once = ClientRequest("x", limits=weighted)
    assert once.wishes == Retention(weight=7)
    assert ClientRequest("x", session="s").wishes.returns
    pinned = ClientRequest("x", retention=Retention(pin_s=300.0), limits=weighted)
    assert pinned.wishes == Retention(returns=True, pin_s=300.0, weight=7)


@pytest.mark.parametrize(
    ("allowed", "asked", "given"),
    [(0, 100, 100), (50, 100, 50), (50, 40, 40), (20, 35, 20)],
)
def test_a_key_bounds_the_priority(allowed: int, asked: int, given: int) -> None:
    limits = Limits(max_kv_priority=allowed)
    request = ClientRequest("x", retention=Retention(priority=asked), limits=limits)
    assert request.wishes == Retention(priority=given)


@pytest.mark.parametrize("allowed", [-1, 101])
def test_a_key_has_no_bound_that_no_priority_reaches(allowed: int) -> None:
    with pytest.raises(BadRequest, match="max_kv_priority"):
        changed(NO_LIMITS, {"max_kv_priority": allowed})


def test_chats_that_return_are_those_with_tools_or_an_answer() -> None:
    user = Message("user", "x")
    assistant = Message("assistant", "y")
    tool = {"type": "function", "function": {"name": "f"}}
    assert not ClientRequest(Conversation((user,))).wishes.returns
    assert ClientRequest(Conversation((user, assistant, user))).wishes.returns
    assert ClientRequest(Conversation((user,), tools=(tool,))).wishes.returns
    assert not ClientRequest(Conversation((user,), (tool,), tool_choice="none")).wishes.returns
